"""The parts of a report's answer that say which arms keep the SLO, how certain that is, and which serves most in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from analysis import format as fmt
from analysis.comparison.arms import Arm, comparable, grouped, on_shared_traces, replicates, same_prices
from analysis.comparison.compare import SLO_METRICS, compare, mean_over_replicates
from analysis.comparison.effects import Compared
from analysis.comparison.wording import no_more_than
from analysis.measures.slo import SLO

_MAX_LOADS, _MAX_SHARES = 4, 4  # loads that differ in it, and shares, for which the attainment is stated
_WELL = 0.99  # of the requests: an SLO that every arm keeps so often tells no arms apart
_names = partial(fmt.names, most=4)


def is_chosen(groups: Sequence[Compared]) -> bool | None:
    """Whether attainment or goodput is among the metrics that the user chose; None if none is chosen."""
    chosen = [row.metric for group in groups for row in group.rows if row.metric.is_chosen]
    return any(metric in SLO_METRICS for metric in chosen) if chosen else None


def tells_apart(groups: Sequence[Compared], slo: SLO) -> bool:
    """Whether the arms differ in attainment or goodput by more than the noise, unless all of them keep the SLO well."""
    rows = [row for group in groups for row in (*group.rows, *(effect.comparison for effect in group.effects))]
    is_claimed = any(row.metric in SLO_METRICS and (row.is_claim or row.is_alike) for row in rows)
    return is_claimed and min(_shares(groups, slo), default=1.0) < _WELL


def kept_briefly(groups: Sequence[Compared], slo: SLO) -> str:
    """The least and the most attainment of any arm, where they are not to be told apart by it; empty if none is
    known."""
    shares, write = sorted(_shares(groups, slo)), SLO_METRICS[0].write
    if not shares:
        return ""
    if not shares[-1]:
        return "no request keeps the SLO in any arm"
    span = " to ".join(dict.fromkeys((write(shares[0]), write(shares[-1]))))
    claim = ", with no claim of a difference" if shares[0] < min(_WELL, shares[-1]) else ""
    return f"every arm keeps the SLO for {span} of the requests{claim}"


def _shares(groups: Sequence[Compared], slo: SLO) -> list[float]:
    known = (mean_over_replicates(arm, SLO_METRICS[0], slo) for group in groups for arm in group.arms)
    return [share for share in known if share is not None]


def kept(groups: Sequence[Compared], slo: SLO, margin: float) -> str:
    """The share of requests that keep the SLO, for each arm, at the first few loads; empty if none is known."""
    told = {group.load: text for group in groups if (text := _kept_at(group, slo, margin))}
    by_text = list(grouped(told, lambda load: told[load]).items())
    parts = [f"at {fmt.listing(loads)}, {text}" if any(loads) else text for text, loads in by_text[:_MAX_LOADS]]
    if left := sum(len(loads) for _, loads in by_text[_MAX_LOADS:]):
        parts.append(fmt.left(left, "load"))
    return "; ".join(parts)


def _kept_at(group: Compared, slo: SLO, margin: float) -> str:
    share = SLO_METRICS[0]
    known = {arm.name: mean_over_replicates(arm, share, slo) for arm in group.arms}
    values = {name: value for name, value in known.items() if value is not None}
    if not values:
        return ""
    if not any(values.values()):
        return f"no request keeps the SLO {'in any arm' if len(values) > 1 else 'in ' + next(iter(values))}"
    by_share = grouped(sorted(values, key=lambda name: -values[name]), lambda name: share.write(values[name]))
    (most, best), *others = by_share.items()
    over = over_replicates(group.arms)
    if not others:
        both = " both" if len(best) == 2 else ""
        names = "every arm" if len(best) > 2 else f"{_names(best)}{both}"
        return f"{names} {'keep' if both else 'keeps'} the SLO for {most} of the requests{over}"
    said = f"{_names(best)} {'keep' if len(best) > 1 else 'keeps'} the SLO for {most} of the requests{over}"
    if len(by_share) <= _MAX_SHARES:
        rest = [f"{_names(those)} for {text}" for text, those in others]
        return f"{said}, {fmt.listing(rest)}{_how_sure(group, by_share, margin)}"
    (least, worst) = others[-1]
    how_sure = _how_sure(group, by_share, margin, (most, least))
    return f"{said}, the most of {len(values)} arms, and {_names(worst)} for {least}, the least{how_sure}"


def over_replicates(arms: Sequence[Arm]) -> str:
    """ " in the mean over 2 to 3 replicates"; "" for one."""
    nums = sorted({len(replicates(arm)) for arm in arms})
    span = f"{nums[0]} to {nums[-1]}" if len(nums) > 1 else nums[0]
    return f" in the mean over {span} replicates" if nums[-1] > 1 else ""


def _how_sure(group: Compared, by_share: Mapping[str, Sequence[str]], margin: float, told: Sequence[str] = ()) -> str:
    """A suffix on the arms that differ from the baseline by the noise or the margin at most, or without an interval.
    told: the shares that the sentence states; empty: all."""
    base, rows = group.arms[0].name, {row.arm: row for row in group.rows if row.metric == SLO_METRICS[0]}
    shown = [text for text, names in by_share.items() if base not in names and (not told or text in told)]
    away = [name for text in shown for name in by_share[text] if name in rows]
    unclaimed = [name for name in away if not rows[name].is_claim]
    undecided = [name for name in unclaimed if rows[name].verdict == "undecided"]
    quiet = [name for name in unclaimed if rows[name].verdict not in ("unknown", "undecided")]
    untested = [name for name in unclaimed if rows[name].verdict == "unknown" and not rows[name].is_alike]
    of_all = [*group.rows, *(effect.comparison for effect in group.effects)]
    claims = [row for row in of_all if row.metric == SLO_METRICS[0] and row.is_claim]
    said = []
    most = no_more_than({rows[name].verdict for name in quiet}, margin)
    if quiet and not untested and not undecided and not claims:
        said.append(f"no difference beyond {most}")
    elif quiet:
        said.append(f"inside {most} against {base}: {_names(quiet)}")
    if undecided:
        said.append(f"undecided against {base}: {_names(undecided)}")
    if untested:
        of = "" if untested == away else f" of {_names(untested)}"
        said.append(f"no interval of the difference{of} is known")
    return f" ({'; '.join(said)})" if said else ""


def best_within(group: Compared, slo: SLO, margin: float) -> str:
    """A clause on the arm with the highest goodput over the replicates that all arms have, and on arms that cannot be
    distinguished from it. "" if no arm has more than the baseline beyond the noise, and of two arms, of which their
    shares and the claim tell it. Arms of another cost model than the baseline's are left out."""
    share, goodput = SLO_METRICS
    base, rows = group.arms[0], [row for row in group.rows if row.metric == goodput and not row.is_of_prices]
    better = [row for row in rows if row.verdict == "higher"]
    arms = on_shared_traces([arm for arm in group.arms if same_prices(arm, base)])
    of_arm = {arm.name: mean_over_replicates(arm, goodput, slo) or 0.0 for arm in arms}
    best = max(arms, key=lambda arm: of_arm[arm.name])
    if not better or best.name == base.name or len(group.arms) == 2:
        return ""
    told = [
        f"{goodput.write(of_arm[arm.name])} ({share.write(mean_over_replicates(arm, share, slo))} of its requests)"
        for arm in (best, arms[0])
    ]
    others = [arm for arm in arms if arm is not best]
    rows = compare([best, *comparable(others, best)], best, [goodput], margin, slo)
    near = [row.arm for row in rows if row.verdict not in ("lower", "higher")]
    also = f"; {fmt.names(near)} {'is' if len(near) == 1 else 'are'} not told apart from it" if near else ""
    return f"{best.name} serves most within the SLO: {told[0]}, {base.name} {told[1]}{also}"
