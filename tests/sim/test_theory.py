"""The simulator against queueing theory, where theory is exact.

With `max_num_seqs=1`, a constant price per step and prompts that fit one step, a request with k output tokens takes k
steps and nobody joins it: service is k steps, the server one, the queue first come, first served. A plan comes at a
step's end, and a request's last step ends when its service does, so that a boundary is never waited for: what waits is
taken at the very instant the server is free. The waits then are those of Lindley's recursion, to the nanosecond; means
are compared with the formulas by independent replications (seeds 0, 1, …), whose first requests are cut.

Sources: D. V. Lindley, "The theory of queues with a single server", 1952; F. Pollaczek, 1930 and A. Khinchine, 1932;
A. Cobham, "Priority assignment in waiting line problems", 1954; L. Kleinrock, "A conservation law for a wide class of
queueing disciplines", 1965.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest

from analysis.measures.statistics import Estimate, mean_t
from testbed.core.limits import Limits
from testbed.traces.arrange import arrange
from testbed.traces.arrivals import ArrivalConfig, instants
from testbed.traces.draws import stream, streams
from testbed.traces.lengths import LengthConfig, endless_lengths
from testbed.traces.schema import Span, Trace, TraceRequest
from tests.properties.setups import Setup
from tests.sim.kit import STEP_NS, serve_trace, trace_of
from tests.sim.queueing import Service, cobham_waits, lindley_waits, pollaczek_khinchine_wait

CONFIDENCE = 0.99  # of each interval; seeds are fixed, so that a test passes always or never
REPLICATIONS = range(8)
NUM_REQUESTS, NUM_CUT = 1700, 200
# prefill_decode_split is left out: its max_num_seqs caps batches, and it prefills the next before the first is done
ONE_BY_ONE = ("unified", "decode_first", "prefill_first", "iteration_level", "static")


def md1_wait(rate: float, service_s: float) -> float:
    """Mean wait of M/D/1: rho S / (2 (1 - rho))."""
    utilisation = rate * service_s
    return utilisation * service_s / (2 * (1 - utilisation))


def core(composition: str = "unified", num_seqs: int = 1, budget: int = 2048, **options: Any) -> Any:
    """A scheduler with memory for everything, so that only its limits count."""
    limits = Limits(num_seqs, budget, 100_000, 0, 1)
    setup = Setup(
        composition, limits=limits, block_size=16, num_blocks=60_000, caching=False, num_cpu_blocks=0, **options
    )
    return setup.scheduler()


def draw(kind: str, rate: float, seed: int, num: int, cv: float = 1.0) -> list[int]:
    return list(islice(instants(ArrivalConfig(kind, rate, cv), streams(seed)), num))


def simulated_waits(rate: float, service: Service, seed: int, *, num: int = NUM_REQUESTS) -> Sequence[int]:
    """Waits of a Poisson stream, in ns, in order of arrival."""
    outputs = service.draw(num, stream(seed, "output"))
    trace = trace_of(draw("poisson", rate, seed, num), outputs)
    return serve_trace(core(), trace).waits_ns


def mean_wait(rate: float, service: Service) -> Estimate:
    """Mean wait in seconds with its interval over replications."""
    means = [float(np.mean(simulated_waits(rate, service, seed)[NUM_CUT:])) / 1e9 for seed in REPLICATIONS]
    return mean_t(np.array(means), level=CONFIDENCE)


def expect_covers(interval: Estimate, formula: float, what: str) -> None:
    assert interval.low <= formula <= interval.high, (
        f"{what}: {formula:.6f} s by the formula is outside [{interval.low:.6f}, {interval.high:.6f}] s; "
        f"seeds {list(REPLICATIONS)}"
    )
    assert interval.high - interval.low < formula, f"{what}: an interval so wide says nothing: {interval}"


# --- one server, exactly ---


@pytest.mark.parametrize("composition", ONE_BY_ONE)
@pytest.mark.parametrize(
    ("arrival", "cv", "outputs"),
    [
        ("poisson", 1.0, LengthConfig("constant", 1)),
        ("poisson", 1.0, LengthConfig("uniform", min_tokens=1, max_tokens=9)),
        ("gamma", 3.0, LengthConfig("constant", 5)),
        ("gamma", 0.5, LengthConfig("lognormal", value=5, sigma=1.0, max_tokens=200)),
        ("deterministic", 1.0, LengthConfig("lognormal", value=3, sigma=0.5, max_tokens=50)),
        ("all_at_once", 1.0, LengthConfig("uniform", min_tokens=1, max_tokens=9)),
    ],
)
def test_every_wait_is_lindleys_to_the_nanosecond(
    composition: str, arrival: str, cv: float, outputs: LengthConfig
) -> None:
    for seed in (0, 1):
        service = [
            min(length, outputs.most) for length in islice(endless_lengths(outputs, stream(seed, "output")), 150)
        ]
        rate = 0.9 / (np.mean(service) * STEP_NS / 1e9)
        instants = draw(arrival, rate, seed, 150, cv)
        simulated = serve_trace(core(composition), trace_of(instants, service))
        expected = lindley_waits(instants, [steps * STEP_NS for steps in service])
        assert simulated.waits_ns == expected, f"seed {seed}"
        ends = [a + w + k * STEP_NS for a, w, k in zip(instants, expected, service, strict=True)]
        assert list(simulated.end.values()) == ends, f"seed {seed}"
        assert max(expected) > 0, "nobody waited"


def test_a_prompt_of_several_steps_is_service_too() -> None:
    """Chunks of 7 of a prompt of 20 take three steps, of which the last emits: k + 2 steps."""
    instants, service = draw("poisson", 15.0, 3, 200), [1, 2, 3, 4] * 50
    simulated = serve_trace(core("unified", budget=7), trace_of(instants, service, num_prompt_tokens=20))
    assert simulated.waits_ns == lindley_waits(instants, [(k + 2) * STEP_NS for k in service])


def test_regular_arrivals_below_capacity_never_wait() -> None:
    """D/D/1 with a utilisation of 1: each comes at the instant at which the one before leaves."""
    assert set(serve_trace(core(), trace_of(draw("deterministic", 100.0, 0, 300), [1] * 300)).waits_ns) == {0}


# --- means, within their confidence intervals ---


@pytest.mark.parametrize(("utilisation", "num_steps"), [(0.3, 1), (0.6, 1), (0.8, 1), (0.7, 4)])
def test_mean_wait_of_deterministic_service_is_md1s(utilisation: float, num_steps: int) -> None:
    service = Service.constant(num_steps, STEP_NS)
    rate = utilisation / service.mean_s
    expect_covers(mean_wait(rate, service), md1_wait(rate, service.mean_s), f"M/D/1 at {utilisation}")


@pytest.mark.parametrize(
    ("service", "utilisation"),
    [
        (Service.uniform(1, 9, STEP_NS), 0.7),
        (Service.geometric(5.0, STEP_NS), 0.4),
        (Service.geometric(5.0, STEP_NS), 0.7),
        (Service.lognormal(5.0, 0.6, 60, STEP_NS), 0.7),
    ],
    ids=lambda value: value.name if isinstance(value, Service) else str(value),
)
def test_mean_wait_of_random_service_is_pollaczek_khinchines(service: Service, utilisation: float) -> None:
    rate = utilisation / service.mean_s
    formula = pollaczek_khinchine_wait(rate, service.mean_s, service.second_moment_s2)
    expect_covers(mean_wait(rate, service), formula, f"M/G/1, {service.name}, at {utilisation}")


def test_pollaczek_khinchine_with_constant_service_is_md1() -> None:
    service = Service.constant(3, STEP_NS)
    assert pollaczek_khinchine_wait(20.0, service.mean_s, service.second_moment_s2) == pytest.approx(
        md1_wait(20.0, service.mean_s), rel=1e-12
    )


@pytest.mark.parametrize("shape", ["uniform", "geometric", "lognormal"])
def test_a_services_moments_are_those_of_its_draws(shape: str) -> None:
    service = {
        "uniform": Service.uniform(1, 9, STEP_NS),
        "geometric": Service.geometric(5.0, STEP_NS),
        "lognormal": Service.lognormal(5.0, 0.6, 60, STEP_NS),
    }[shape]
    seconds = np.asarray(service.draw(400_000, stream(0, shape))) * STEP_NS / 1e9
    assert seconds.mean() == pytest.approx(service.mean_s, rel=0.01)
    assert (seconds**2).mean() == pytest.approx(service.second_moment_s2, rel=0.02)


def test_a_formula_that_is_wrong_is_not_covered() -> None:
    """M/M/1's mean wait is twice M/D/1's: the intervals tell them apart."""
    service = Service.constant(1, STEP_NS)
    interval = mean_wait(0.6 / service.mean_s, service)
    assert interval.high < 2 * md1_wait(0.6 / service.mean_s, service.mean_s)


# --- disciplines ---


@pytest.mark.parametrize("queue", ["lcfs", "random", "priority", "sjf", "vtc"])
def test_with_equal_services_the_sum_of_waits_does_not_depend_on_the_discipline(queue: str) -> None:
    """Kleinrock's conservation law on one path: whoever is served, as many wait. Only who waits differs."""
    trace = prioritised(draw("poisson", 0.85 / (2 * STEP_NS / 1e9), 5, 600), [2] * 600)
    fcfs = serve_trace(core(), trace)
    other = serve_trace(core(queue=queue), trace)
    assert sum(other.waits_ns) == sum(fcfs.waits_ns) > 0
    assert other.makespan_ns == fcfs.makespan_ns
    if queue in ("lcfs", "random"):
        assert other.waits_ns != fcfs.waits_ns
        assert np.var(other.waits_ns) > np.var(fcfs.waits_ns), "FCFS has the least variance"


def test_mean_waits_of_two_priorities_are_cobhams() -> None:
    service, rates = Service.geometric(4.0, STEP_NS), (7.0, 10.0)
    means: list[list[float]] = [[], []]
    for seed in REPLICATIONS:
        num = NUM_REQUESTS
        instants = draw("poisson", sum(rates), seed, num)
        urgent = stream(seed, "class").random(num) < rates[0] / sum(rates)
        trace = prioritised(instants, service.draw(num, stream(seed, "output")), [int(not one) for one in urgent])
        waits = np.asarray(serve_trace(core(queue="priority"), trace).waits_ns)[NUM_CUT:] / 1e9
        for index, chosen in enumerate((urgent[NUM_CUT:], ~urgent[NUM_CUT:])):
            means[index].append(float(waits[chosen].mean()))
    formulas = cobham_waits(rates, service.mean_s, service.second_moment_s2)
    for name, found, formula in zip(("urgent", "other"), means, formulas, strict=True):
        expect_covers(mean_t(np.array(found), level=CONFIDENCE), formula, f"Cobham, {name}")


def prioritised(instants: Sequence[int], outputs: Sequence[int], priorities: Sequence[int] | None = None) -> Trace:
    return arrange(
        "classes",
        [
            TraceRequest(
                f"r{i}", at, (Span(2 * i, 0, 1),), Span(2 * i + 1, 0, k),
                priority=i % 3 if priorities is None else priorities[i], tenant="ab"[i % 2],
            )
            for i, (at, k) in enumerate(zip(instants, outputs, strict=True))
        ],
    )  # fmt: skip


# --- saturation and batches ---


@pytest.mark.parametrize("composition", ONE_BY_ONE)
def test_a_saturated_server_serves_one_request_each_service_time(composition: str) -> None:
    instants = draw("poisson", 2 / (3 * STEP_NS / 1e9), 1, 300)
    simulated = serve_trace(core(composition), trace_of(instants, [3] * 300))
    ends = list(simulated.end.values())
    idle_ns = simulated.makespan_ns - 300 * 3 * STEP_NS
    assert 0 <= idle_ns < 10 * STEP_NS, "it is saturated but for its start"
    assert {after - before for before, after in pairwise(ends[50:])} == {3 * STEP_NS}


@pytest.mark.parametrize("composition", ["unified", "decode_first", "iteration_level"])
def test_a_saturated_batch_emits_a_token_of_each_place_in_each_step(composition: str) -> None:
    """B places: B / S tokens a second, whoever holds them."""
    outputs = [1 + i % 7 for i in range(400)]
    simulated = serve_trace(core(composition, num_seqs=16), trace_of([0] * 400, outputs))
    assert simulated.end == list_schedule(outputs, 16)


def list_schedule(outputs: Sequence[int], num_places: int) -> dict[str, int]:
    """When each ends if it takes the place that is free first: all come at once, and none waits for a batch."""
    free = [0] * num_places
    ends = {}
    for i, num_steps in enumerate(outputs):
        ends[f"r{i}"] = end = heapq.heappop(free) + num_steps * STEP_NS
        heapq.heappush(free, end)
    return ends


@pytest.mark.parametrize("num_seqs", [1, 3, 8])
def test_a_static_batch_lasts_as_long_as_its_longest_member(num_seqs: int) -> None:
    outputs = [1 + (5 * i) % 11 for i in range(40)]
    batches = [outputs[i : i + num_seqs] for i in range(0, 40, num_seqs)]
    simulated = serve_trace(core("static", num_seqs), trace_of([0] * 40, outputs))
    assert simulated.makespan_ns == sum(map(max, batches)) * STEP_NS


@pytest.mark.parametrize("composition", ["prefill_first", "prefill_decode_split"])
@pytest.mark.parametrize(("num_requests", "per_step"), [(12, 5), (7, 7), (9, 1)])
def test_prefill_first_reads_all_prompts_before_anyone_decodes(
    composition: str, num_requests: int, per_step: int
) -> None:
    """P = ceil(n / prompts in a step) steps of prompts; then all decode together: k - 1 steps more."""
    outputs = [2 + i % 4 for i in range(num_requests)]
    scheduler = core(composition, num_seqs=64, budget=10 * per_step)
    simulated = serve_trace(scheduler, trace_of([0] * num_requests, outputs, num_prompt_tokens=10))
    num_prefills = -(-num_requests // per_step)
    assert simulated.end == {f"r{i}": (num_prefills + k - 1) * STEP_NS for i, k in enumerate(outputs)}


@pytest.mark.parametrize("composition", ["unified", "decode_first"])
def test_chunks_fill_the_budget_of_every_step(composition: str) -> None:
    """n prompts of L tokens and one token each: ceil(n L / budget) steps, whatever the borders of the prompts."""
    for num_requests, length, budget in ((1, 100, 32), (6, 50, 32), (5, 33, 64), (3, 64, 64)):
        scheduler = core(composition, num_seqs=64, budget=budget)
        simulated = serve_trace(scheduler, trace_of([0] * num_requests, [1] * num_requests, num_prompt_tokens=length))
        assert simulated.makespan_ns == -(-num_requests * length // budget) * STEP_NS


def test_equal_requests_in_lockstep_take_the_same_time_under_every_policy() -> None:
    """n requests of k tokens in batches of B: ceil(n / B) k steps."""
    for composition in ONE_BY_ONE:
        simulated = serve_trace(core(composition, num_seqs=4), trace_of([0] * 10, [6] * 10))
        assert simulated.makespan_ns == 3 * 6 * STEP_NS, composition
