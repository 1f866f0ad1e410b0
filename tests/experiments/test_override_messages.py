"""Values of another type, and keys of another option, are refused in one line: key, value, what was expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.configuration.compose import compose_config, compose_from
from testbed.errors import ConfigError
from tests.experiments.kit import SHORT, TINY, Say, option

WRONG = [
    ("scheduler.max_num_seqs=abc", "scheduler.max_num_seqs is 'abc'; it must be a whole number"),
    ("cache.block_size=1.5", "cache.block_size is '1.5'; it must be a whole number"),
    ("cache.prefix_caching=maybe", "cache.prefix_caching is 'maybe'; it must be true or false"),
    ("sampling.temperature=hot", "sampling.temperature is 'hot'; it must be a number"),
    ("scheduler.max_num_seqs=null", "scheduler.max_num_seqs is null; it must have a value"),
    ("seed=x", "seed is 'x'; it must be a whole number"),
    ("cache.num_gpu_blocks=", "cache.num_gpu_blocks has no value; give one, or null for none"),
    ("cache={num_gpu_blocks: ''}", "cache.num_gpu_blocks has no value; give one, or null for none"),
    ("model.name=", "model.name is ''; it must be a name"),
    ("model.name=null", "model.name is null; it must be a name"),
    ("device.name=", "device.name is ''; it must be a name"),
    ("scheduler={kv_rules: {full_length_must_fit: 2}}",
     "scheduler.kv_rules.full_length_must_fit is '2'; it must be true or false"),
    ("trace={prompt: 5}", "trace.prompt is '5'; it is a group of keys: set one as trace.prompt.<key>=<value>"),
    ("trace={transforms: {name: thin}}",
     "trace.transforms is '{…}'; it must be a list, as in 'trace.transforms=[{name: thin, fraction: 0.5}]' (quoted "
     "for the shell)"),
    ("trace.prompt=???", "trace.prompt is '???', which stands for a value that is missing; give one"),
    ("trace={prompt: {value: ???}}", "trace.prompt.value is '???', which stands for a value that is missing; give one"),
    (
        "trace.agent={call: 5}",
        "trace.agent.call is '5'; it is a group of keys: set one as trace.agent.call.<key>=<value>",
    ),
    ("trace.prompt=5", "trace.prompt is '5'; it is a group of keys: set one as trace.prompt.<key>=<value>"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "expected"), WRONG)
def test_a_value_of_another_type_is_named_with_what_was_expected(override: str, expected: str) -> None:
    saved = dict(compose_config([]).raw)
    for compose in (lambda: compose_config([override]), lambda: compose_from(saved, [override])):
        with pytest.raises(ConfigError) as caught:
            compose()
        assert str(caught.value) == expected


@pytest.mark.parametrize(
    "override", ["hydra.sweep.dir=x", "++hydra.run.dir=x", "hydra={verbose: true}", "hydra/launcher=basic"]
)
def test_a_key_of_hydras_is_refused_where_hydra_makes_no_run(override: str, say: Say) -> None:
    saved = dict(compose_config([]).raw)
    told = f"{override} has no effect here: Hydra's keys are of `testbed run` (with from=: hydra.run.dir); "
    told += "leave it out"
    for compose in (lambda: compose_config([override]), lambda: compose_from(saved, [override])):
        with pytest.raises(ConfigError) as caught:
            compose()
        assert str(caught.value) == told
    assert say("calibrate", override).error() == told


def test_a_key_that_only_begins_as_hydras_do_is_one_of_no_group(say: Say) -> None:
    assert "unknown key 'hydrant'; at the top there are: " in say("run", "-m", "hydrant=1,2").error()


@pytest.mark.parametrize("value", ["1", "null", "[a]"])
def test_hydra_itself_is_no_key(value: str, say: Say) -> None:
    told = f"hydra={value}: name one of Hydra's keys, as hydra.sweep.dir=<folder>"
    assert say("run", f"hydra={value}").error() == told


def test_hydra_s_keys_may_come_as_one(tmp_path: Path, say: Say) -> None:
    say("run", *TINY, *SHORT, f"hydra={{run: {{dir: {tmp_path / 'a'}}}}}").success()
    assert (tmp_path / "a" / "done").exists()


@pytest.mark.parametrize(
    ("override", "near"),
    [("scheduler=VLLM_V1", "vllm_v1"), ("SEED=3", "seed"), ("Trace.Rate=4", "trace.rate"), ("cost.CUDA_graphs=1",
     "cost.cuda_graphs"), ("scheduler.queue_order=FCFS", "fcfs")],
)  # fmt: skip
def test_what_differs_in_letter_case_is_meant(override: str, near: str, say: Say) -> None:
    assert f"did you mean '{near}'? " in say("run", override).error()


@pytest.mark.parametrize("option", ["mine", "mine.yml"])
def test_an_option_s_file_of_another_extension_is_named(tmp_path: Path, say: Say, option: str) -> None:
    (file := tmp_path / "device" / "mine.yml").parent.mkdir()
    file.write_text("defaults: [h100]")
    told = f"{file}: the file of an option ends in .yaml; rename it to mine.yaml"
    assert say("run", "--config-dir", str(tmp_path), f"device={option}").error() == told
    file.unlink()
    file.mkdir()
    assert "device has no option" in say("run", "--config-dir", str(tmp_path), f"device={option}").error()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["backend=vllm", "backend.num_replicas=2"],
         "backend.num_replicas is a key of backend=sim or real; leave it out, or choose backend=sim"),
        (["backend=real", "backend.swap_overlap=true"],
         "backend.swap_overlap is a key of backend=sim; leave it out, or choose backend=sim"),
        (["cost=constant", "cost.path=fit.json"],
         "cost.path is a key of cost=tables or calibrated; leave it out, or choose cost=tables; cost=constant has: "
         "step_s"),
        (["cost=linear", "cost.path=fit.json"],
         "cost.path is a key of cost=tables or calibrated; leave it out, or choose cost=tables; cost=linear has: "
         "base_s, per_prefill_token_s, per_decode_s, per_decode_context_token_s, per_prefill_attention_pair_s, "
         "per_swapped_block_s, per_copied_block_s"),
        (["trace.spread_batches=true"],
         "trace.spread_batches is a key of trace=mooncake; leave it out, or choose trace=mooncake"),
    ],
)  # fmt: skip
def test_a_key_of_another_option_names_that_option(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config(overrides)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["trace=azure", "trace.path="], "trace.path has no value; give one, or null for none"),
        (["scheduler="], "scheduler= names no option; expected key=value, and for scheduler one of: decode_first, "),
        (["experiment=null"], "experiment=null names no option; "),
        (["hydra.sweep.dri=x"], "unknown key 'hydra.sweep.dri'; did you mean 'hydra.sweep.dir'? hydra.sweep has: dir"),
        (["hydra.mode=SWEEP"], "hydra.mode is 'SWEEP'; it must be one of: RUN, MULTIRUN"),
        (["hydra.sweeper.max_batch_size=2"], "unknown key 'hydra.sweeper.max_batch_size'; hydra.sweeper has: "),
        (["hydra/sweeper=optuna"], "hydra/sweeper has no option 'optuna'; valid: testbed"),
        (["hydra/job_logging=none"], "hydra/job_logging=none: a run writes its own log, run.log; leave it out"),
        (["hydra.searchpath=x"], "hydra.searchpath=x: give a list of folders, as 'hydra.searchpath=[file://my_conf]'"),
        (["hydrant=x"], "unknown key 'hydrant'; at the top there are: backend, "),
        (["+scheduler=orca"], "+scheduler=orca: a run has its scheduler; choose another without the +"),
        (["+experiment=watermark"], "+experiment=watermark: a run has its experiment; choose another without the +"),
        (["report.question=\udcff"], "'report.question=\\udcff' is not UTF-8; give it in that encoding"),
        (["scheduler=sjf"], "scheduler has no option 'sjf' (a value of scheduler.queue_order); valid: decode_first, "),
        (["scheduler=random"], "scheduler has no option 'random' (a value of scheduler.queue_order, backend.router); "),
        (
            ["scheduler=mine"],
            "scheduler has no option 'mine' (one of your own is for `testbed run --config-dir=<its folder>`); valid: ",
        ),
        (["hydra/job_logging=nope"], "hydra/job_logging has no option 'nope'; did you mean 'none'? "),
        (["report.question=a ${nope} b"],
         "report.question: Interpolation key 'nope' not found: name a key that exists, or write \\${…} for the text"),
        (["scheduler.victim={_target_: mine}"], "scheduler.victim._target_ is 'mine'; it must be a module and a class"),
        (["cache.foo=${nope}"], "unknown key 'cache.foo'; cache has: "),
        (["cache.block_size.x="], "unknown key 'cache.block_size.x'; cache.block_size has no keys of its own"),
        (["model.rope_scaling={}"], "model.rope_scaling.rope_type is missing; give it a value"),
        (["trace.turn_prompt=3"], "trace.turn_prompt is 3; it must be a group with keys of kind, value, "),
        (["report.replicates=${seed}"], "report.replicates is 0; it must be a list"),
        (["trace.tenants=[{name: a, shares: 1}]"], "unknown key 'trace.tenants[0].shares'; did you mean 'share'? "),
        (["trace.tenants=[{name: a, num_tenants: 1}]"], "unknown key 'trace.tenants[0].num_tenants'; valid: name, sh"),
        (["trace.max_turns=20_000_000"], "trace.max_turns is 20000000; it must be 1 to 10,000,000"),
        (
            ["trace.transforms=[{name: jitter, within_s: 1, seed: -1}]"],
            "trace.transforms[0].seed is -1; it must be from 0 to ",
        ),
        (["trace.rate=${oc.env:NOT_SET_AT_ALL}"], 'trace.rate: KeyError raised while resolving interpolation: "Env'),
        (["trace.rate=${trace.rate}"],
         "trace.rate: Recursive interpolation detected: it asks for itself, maybe by way of others; give one"),
        (["scheduler.speculative_decoding=1"], "unknown key 'scheduler.speculative_decoding'; scheduler has: name"),
        (["scheduler.chunk_budget=1"], "unknown key 'scheduler.chunk_budget'; scheduler has: "),
        (["model.lora=1"], "unknown key 'model.lora'; model has: "),
        (["backend.disaggregated=1"], "unknown key 'backend.disaggregated'; backend has: "),
        (["speculation=1"], "unknown key 'speculation'; at the top there are: "),
        (["lora=1"], "unknown key 'lora'; at the top there are: "),
        (["rate=9"], "unknown key 'rate'; did you mean 'trace.rate'?"),
        (["scheduler.queue=9"], "unknown key 'scheduler.queue'; did you mean 'scheduler.queue_order'?"),
        (["scheduler.prefix_caching=false"], "unknown key 'scheduler.prefix_caching'; did you mean 'cache.prefix_c"),
        (["cache={blok_size: 3}"], "unknown key 'cache.blok_size'; did you mean 'cache.block_size'? cache has: "),
        (["trace.prompt={kind: constant, valu: 3}"], "unknown key 'trace.prompt.valu'; did you mean 'trace.prompt.va"),
        *((["model=tiny", f"backend={backend}", "sampling.logit_bias=[[5,1],[99999,1.0]]"],
           "sampling.logit_bias names token 99999; the vocabulary of model tiny has ids 0 to ")
          for backend in ("sim", "real")),
        (["sampling.stop_token_ids=[1,x]"], "an item of sampling.stop_token_ids is 'x'; it must be a whole number"),
        (["~cache.watermark"], "~cache.watermark: a run has all of its keys; give this one a value"),
        (["~nowhere"], "~nowhere: a run has all of its keys; give this one a value"),
        (["scheduler.max_num_seqs=0"], "scheduler.max_num_seqs is 0; it must be at least 1"),
        (["scheduler=[orca]"], "scheduler=[orca] is no name of an option; "),
        (["+hydra/nope=x"], "hydra/nope is no group of Hydra's own, nor one in a folder of --config-dir; leave it out"),
        (["--config-dir="], "--config-dir is ''; name a folder of your own options, as --config-dir=my_conf"),
        (["--config-name=x"], "--config-name=x: a run has one configuration; options of your own, "),
        (["cache.prefix_caching=2"], "cache.prefix_caching is '2'; it must be true or false"),
        (["cache.prefix_caching=-1"], "cache.prefix_caching is '-1'; it must be true or false"),
        (["cache={prefix_caching: 2}"], "cache.prefix_caching is '2'; it must be true or false"),
        (["trace.transforms.thin=1"], "unknown key 'trace.transforms.thin'; trace.transforms has no keys of its own"),
        (["trace.transforms={name: thin}"], "trace.transforms is '{name: thin}'; it must be a list, as in "),
        (["model=llama3.1_8b", "model.rope_scaling.fator=4"],
         "unknown key 'model.rope_scaling.fator'; did you mean 'm"),
        (["slo.ttft_s=1" + "0" * 400], "slo.ttft_s=1000"),
        (["experiment=watermark", "trace=azure", "trace.path=conv.csv"],
         "experiment=watermark: trace.num_requests is a key of trace=synthetic; leave it out (trace.limit takes the "
         "first requests of a file), or choose trace=synthetic"),
        (["experiment=demo", "cost.step_s=1"], "cost.step_s is a key of cost=constant; leave it out, or choose cost=c"),
        (["record.explain=true", "record.steps=false"], "record.explain=true tells of steps, and record.steps is f"),
        (["slo.itl_max_s=1", "record.token_times=false"], "slo.itl_max_s is 1, and with record.token_times=false no g"),
        (["experiment=watermark", "cache.watermrak=1"],
         "unknown key 'cache.watermrak'; did you mean 'cache.watermark'"),
        (["scheduler={kv_rules.allocate: whole}"],
         "unknown key 'scheduler.kv_rules.allocate'; there a key is below its group, as kv_rules: {allocate: …}"),
        (["cache={cache.num_gpu_blocks: 1500}"],
         "unknown key 'cache.cache.num_gpu_blocks'; there a key is below its group, as cache: {num_gpu_blocks: …}"),
    ],
)  # fmt: skip
def test_what_hydra_does_not_say_well_is_said_before_it_composes(
    overrides: list[str], expected: str, tmp_path: Path, say: Say
) -> None:
    said = say("run", *overrides, f"hydra.run.dir={tmp_path / 'run'}")
    assert said.error().startswith(expected)
    assert not (tmp_path / "run").exists()


def test_a_folder_is_not_named_by_a_key_that_does_not_exist(say: Say) -> None:
    told = "hydra.run.dir: Interpolation key 'schedular.name' not found: name a key that exists, or write "
    assert say("run", "hydra.run.dir=${schedular.name}").error().startswith(told)


@pytest.mark.parametrize("order", [1, -1])
def test_an_experiment_and_the_run_of_a_folder_are_not_both(order: int, say: Say) -> None:
    error = say("run", *["from=a", "experiment=watermark"][::order]).error()
    assert error == "from= and experiment=watermark both say what is run; leave one out"


def test_a_text_that_is_empty_by_default_may_be_set_to_that() -> None:
    assert compose_config(["report.question="]).report.question == ""


def test_a_dollar_is_a_dollar_where_it_is_escaped() -> None:
    assert compose_config(["report.question='is ${seed} \\${nope}?'"]).report.question == "is 0 ${nope}?"


def test_an_own_overlay_names_its_file(tmp_path: Path, say: Say) -> None:
    run = ("run", "--config-dir", str(tmp_path), "experiment=mine", f"hydra.run.dir={tmp_path / 'run'}")
    begin = "# @package _global_\ndefaults: [demo, {override /cost: constant}]\n"
    for text, expected in (
        ("cache:\n  blok_size: 3\n", "line 4: unknown key 'cache.blok_size'; did you mean 'cache.block_size'? "),
        ("trace:\n  path: x\nsed: 1\n", "line 5: unknown key 'sed'; did you mean 'seed'? "),
        ("cost:\n  step_s: fast\n", "line 4: cost.step_s is 'fast'; it must be a number"),
        ("trace:\n  prompt: 3\n", "line 4: trace.prompt is '3'; it is a group of keys: set one as trace.prompt.<key>"),
        (
            "cost:\n  _target_: mine.Own\n",
            "line 4: cost._target_: cost is a whole group, so a class of your own for it",
        ),
        (
            "cache.block_size: 32\n",
            "line 3: unknown key 'cache.block_size'; there a key is below its group, as cache: {block_size: …}",
        ),
        ("trace:\n  transforms: {name: thin}\n", "line 4: trace.transforms is '{…}'; it must be a list, as in 'trace."),
        ("cache:\n  prefix_caching: 2\n", "line 4: cache.prefix_caching is '2'; it must be true or false"),
        ("report:\n  question: ${nope}\n", "line 4: report.question: Interpolation key 'nope' not found: name a key"),
        ("cache:\n", "line 3: cache is empty, and a run has its cache; give it keys, or leave the line out"),
    ):
        file = option(tmp_path, "experiment/mine", f"{begin}{text}")
        assert say(*run).error().startswith(f"{file}, {expected}")
    option(tmp_path, "experiment/mine", f"{begin}cost: {{step_s: 1}}\n")
    say(*run, *TINY, "trace.num_requests=3", "cache.num_gpu_blocks=2000", "allow_ignored=true").success()


def test_options_in_folders_of_a_folder_and_in_packages(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "own_conf"
    option(folder, "record/deep/thin", "# @package record\ntoken_times: false\n")
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for number, searched in enumerate((f"hydra.searchpath=[file://{folder}]", "hydra.searchpath=[pkg://own_conf]")):
        run = ("run", *TINY, *SHORT, searched, f"hydra.run.dir={tmp_path / str(number)}")
        say(*run, "record=deep/thin").success()
        assert "record has no option 'deep/thn'" in say(*run, "record=deep/thn", "overwrite=true").error()
    assert "no package 'nowhere.conf'" in say("run", "hydra.searchpath=[pkg://nowhere.conf]").error()


def test_several_overlays_and_one_without_its_first_line(tmp_path: Path, say: Say) -> None:
    compose_config(["experiment=[demo,admission]", "cache.watermark=${scheduler.watermark}"])
    for text, expected in (
        ("cache: {block_size: 32}\n", ": an overlay begins with the line '# @package _global_'"),
        ("", ": an overlay begins with the line '# @package _global_'"),
        ("seed: 1\ncache: [1\n", ", line 3: not YAML: expected ',' or ']', but got '<stream end>'"),
    ):
        option(tmp_path, "experiment/mine", text)
        said = say("run", f"--config-dir={tmp_path}", "experiment=mine", f"hydra.run.dir={tmp_path / 'a'}")
        assert said.error().endswith(f"mine.yaml{expected}")


@pytest.mark.parametrize(
    ("plugin", "what"),
    [("launcher=ray", "'.[ray]' in the repository"), ("launcher=submitit_slurm", "'.[slurm]' in the repository")],
)
def test_a_launcher_that_is_not_installed_names_what_to_install(
    plugin: str, what: str, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.configuration.options.Library.names", lambda library, group: ["basic"])
    error = say("run", "-m", f"hydra/{plugin}", "seed=0,1").error()
    assert error.endswith(f"needs a package that is not installed: pip install {what}")


def test_a_value_may_be_taken_from_what_is_given_whole() -> None:
    whole = "trace.turn_prompt={kind: constant, value: 9}"
    config = compose_config([whole, "report.question='${trace.turn_prompt.kind}?'"])
    assert config.report.question == "constant?"


GONE = (
    "error: backend.fast_forward is gone: every step is planned by itself, and as fast in the compiled core; "
    "leave it out\n"
)


@pytest.mark.parametrize(
    ("value", "more"), [("true", ()), ("false", ()), ("false", ("backend=real",)), ("false,true", ("--multirun",))]
)
def test_a_setting_that_is_gone_says_why_it_is_not_needed(
    value: str, more: tuple[str, ...], tmp_path: Path, say: Say
) -> None:
    folders = (f"hydra.run.dir={tmp_path / 'run'}", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    said = say("run", f"backend.fast_forward={value}", *more, *folders)
    assert said.status != 0
    assert (said.out, said.err) == ("", GONE)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("given", ["scheduler.name=sarathi", "scheduler={name: sarathi, max_num_seqs: 4}"])
def test_a_name_is_no_way_to_choose(given: str) -> None:
    """Runs of one scheduler under two names would be compared as two."""
    renamed = "scheduler.name=sarathi would only rename what is chosen; choose it as scheduler=sarathi"
    with pytest.raises(ConfigError) as caught:
        compose_config([given])
    assert str(caught.value) == renamed
    assert compose_config(["scheduler={name: vllm_v1, max_num_seqs: 4}"]).scheduler.max_num_seqs == 4
    assert compose_config(["scheduler=sarathi", "scheduler.name=sarathi"]).scheduler.name == "sarathi"
    assert compose_config(["scheduler=sarathi", "scheduler.name=mine"]).scheduler.name == "mine"


OVERLAY = "# @package _global_\n"
WRONG_PAIRS = (
    "override /schedulr: vllm_v1", "/scheduler: vllm_v1", "override scheduler: vllm_v1", "override /scheduler: 1",
    "override /scheduler@x: vllm_v1", "overide /scheduler: vllm_v1",
)  # fmt: skip


@pytest.mark.parametrize(
    ("file", "text", "more", "error"),
    [
        ("scheduler/mine", "defaults: [vlm_v1, _self_]", (),
         "FILE: its defaults name scheduler=vlm_v1, which does not exist; did you mean 'vllm_v1'?"),
        ("scheduler/mine", "defaults: [_schemas, _self_]", (), "FILE: its defaults name scheduler=_schemas, which"),
        ("model/mine", "defaults: [qwen3_0.7b, _self_]", (), "FILE: its defaults name model=qwen3_0.7b, which"),
        ("experiment/mine", "# @package _global_\ndefaults:\n  - override /device: h1000", (),
         "FILE: its defaults name device=h1000, which does not exist; did you mean 'h100'?"),
        ("scheduler/mine", "defaults: [_schema, _self_]\nmax_num_seqs: -8", (),
         "FILE, line 2: scheduler.max_num_seqs is -8; it must be at least 1"),
        ("scheduler/mine", "defaults: [_schema, _self_]\nmax_num_seqs: -8", ("scheduler.max_num_seqs=-7",),
         "scheduler.max_num_seqs is -7; it must be at least 1"),
        ("scheduler/mine", "defaults: [vllm_v1, _self_]\nmax_num_seqs: 3\nmax_num_seqs: 4", (),
         "FILE, line 3: not YAML: found duplicate key max_num_seqs"),
        ("scheduler/mine", "defaults: [vllm_v1, _self_]\nmax_num_seqs: ${oc.env:NOT_SET_AT_ALL}", (),
         "FILE, line 2: scheduler.max_num_seqs: KeyError raised while resolving interpolation"),
        ("scheduler/mine", "defaults: [vllm_v1, _self_]\nmax_num_seqs: ${oc.env:NOT_SET_AT_ALL}",
         ("scheduler.max_num_seqs=-7",), "scheduler.max_num_seqs is -7; it must be at least 1"),
        ("scheduler/mine", "defaults: [a b]", (), "FILE: Could not load 'scheduler/a b'."),
        ("scheduler/mine", "defaults: [{/scheduler@_here_: vllm_v1}, _self_]", (),
         "FILE: its defaults have /scheduler@_here_: vllm_v1; name options as [vllm_v1, _self_]"),
        *(("experiment/mine", f"{OVERLAY}defaults: [{{{pair}}}]", (),
           f"FILE: its defaults have {pair}; name options as override /scheduler: sarathi") for pair in WRONG_PAIRS),
        ("experiment/mine", f"{OVERLAY}defaults: [override /hydra/launcher: slrum]", (),
         "FILE: its defaults name hydra/launcher=slrum, which does not exist; "),
        ("experiment/mine", f"{OVERLAY}hydra: 3", (), "FILE: "),
        *(("experiment/mine", f"{OVERLAY}hydra: {{mode: MULTIRUN, sweeper: {{params: {params}}}}}", (),
           "FILE: hydra.sweeper.params is ") for params in ("[seed: '0,1']", "{seed: [0, 1]}", "{seed: null}", "seed")),
        ("model/mine", "_target_: mine.Model", (), "model._target_: no class of your own stands for model; give its"),
        ("cache/mine", "_target_: mine.Cache", (), "cache._target_: no class of your own stands for cache; give its"),
        ("cache/mine", "defaults: [default]\nprefix_caching: maybe\n", (),
         "FILE, line 2: cache.prefix_caching is 'maybe'; it must be true or false"),
        ("cost/mine", "_target_: mine cost.Price", (),
         "FILE, line 1: cost._target_ is 'mine cost.Price'; it must be a module and a class in it, as mine.Class"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_an_own_option_names_its_file(
    file: str, text: str, more: tuple[str, ...], error: str, tmp_path: Path, say: Say
) -> None:
    written = option(tmp_path, file, text)
    said = say("run", "--config-dir", str(tmp_path), file.replace("/", "="), *more, "trace.num_requests=2")
    assert said.error().startswith(error.replace("FILE", str(written)))
    assert "Config search path" not in said.error(), "all places where Hydra looks"


def test_an_overlay_may_take_parts_from_a_group_of_one_s_own(tmp_path: Path) -> None:
    option(tmp_path, "parts/small", "cache: {num_gpu_blocks: 64}\n")
    defaults = "[/parts@_global_: small, _self_, override  /scheduler: sarathi]"
    option(tmp_path, "experiment/mine", f"{OVERLAY}defaults: {defaults}\nseed: 3\n")
    config = compose_config(["experiment=mine", f"hydra.searchpath=[{tmp_path}]"])
    assert (config.scheduler.name, config.cache.num_gpu_blocks, config.seed) == ("sarathi", 64, 3)
