"""Profiles: what is written is read again, and what is wrong is named."""

import json
from dataclasses import asdict, replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sim.cost.roofline import RooflineCost
from testbed.core.outcome import Spans
from testbed.core.plan import BatchShape, PrefillChunk
from testbed.errors import ConfigError, ProfileError
from testbed.specs.device import DeviceSpec
from testbed.specs.model import RopeScaling
from testbed.specs.profiles import (
    COLUMNS,
    METADATA_KEY,
    MeasuredStep,
    ProfileManifest,
    number_repeats,
    read_profile,
    write_profile,
)
from tests.cost.profiling import MODEL, grid, manifest, measured

STEPS = measured(RooflineCost(MODEL, DeviceSpec("h100")), grid(), repeats=2)
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "p.parquet"


def check_refused(file, message):
    with pytest.raises(ProfileError, match=message):
        read_profile(file)


def rewrite(file, document):
    """Gives the file another manifest."""
    table = pq.read_table(file).replace_schema_metadata({METADATA_KEY: json.dumps(document)})
    pq.write_table(table, file)


def test_a_profile_is_read_as_it_was_written(file):
    file = file.parent / "a" / "b" / file.name
    made = manifest(versions={"torch": "2"}, attention="triton", sliding_window=64, date="2026-11-21", command="x")
    write_profile(file, made, STEPS)
    assert read_profile(file) == (made, STEPS)
    assert pq.read_table(file).column_names == list(COLUMNS)


def test_a_profile_of_before_repeated_positions_were_counted_has_none(file):
    write_profile(file, manifest(), STEPS)
    pq.write_table(pq.read_table(file).drop_columns("repeated_context_tokens"), file)
    assert read_profile(file) == (manifest(), STEPS)


def test_a_misspelt_column_is_named(file):
    write_profile(file, manifest(), STEPS[:1])
    pq.write_table(pq.read_table(file).rename_columns({"repeated_context_tokens": "repeat_context_tokens"}), file)
    rewrite(file, asdict(manifest()))
    said = r"p.parquet has an unknown column 'repeat_context_tokens'; did you mean 'repeated_context_tokens'\?"
    check_refused(file, said)


def test_repeats_of_a_shape_are_counted():
    one, two = BatchShape(1, 5, (), 1), BatchShape(2, 9, (), 2)
    steps = number_repeats([(one, Spans(), 3), (two, Spans(), 3), (one, Spans(), 4)])
    assert [step.repeat for step in steps] == [0, 0, 1]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_decodes", -1, "row 1: num_decodes is -1; expected a whole number, at least 0"),
        ("num_decodes", None, "row 1: num_decodes is null; expected a whole number"),
        ("total_ns", 0, "row 1: total_ns is 0; expected a whole number, at least 1"),
        ("swap_ns", -5, "row 1: swap_ns is -5"),
        ("total_ns", 3_600_000_000_001, "row 1: total_ns is 3600000000001; expected at most 3,600,.*, an hour"),
        ("prefills", None, "row 1: prefills is null; expected a list, which may be empty"),
        ("prefills", [None], r"row 1: prefills\[0\] is None; expected start and num_tokens"),
        ("prefills", [{"start": 0, "num_tokens": 0}], r"row 1: prefills\[0\].num_tokens is 0; expected .* at least 1"),
        ("prefills", [{"start": -3, "num_tokens": 1}], r"row 1: prefills\[0\].start is -3"),
        ("prefills", [], "row 1: the step computed and moved nothing"),
        ("decode_context_tokens", 7, "row 1: decode_context_tokens is 7 with 0 decodes; expected at least one"),
        ("longest_decode_context", 9, "row 1: longest_decode_context is 9 of 0 decodes that attend to 0 positions"),
        ("repeated_context_tokens", 1, "row 1: repeated_context_tokens is 1 of 0 positions, .* expected at most 0"),
        ("num_samples", 2, "row 1: num_samples is 2; expected at most a row each, 1"),
        ("forward_ns", 1_000_010, "row 1: forward_ns is 1000010, and total_ns 9; expected no part longer than its"),
        ("num_blocks_copied", 2**41, "row 1: num_blocks_copied is 2199023255552; expected at most 1,099,511,627,776"),
        ("prefills", [{"start": 40_000, "num_tokens": 961}],
         r"row 1: prefills\[0\] is .*; expected to end within the "),
    ],
)  # fmt: skip
def test_a_bad_row_is_named(file, field, value, message):
    step = dict.fromkeys(COLUMNS, 0) | {"prefills": [{"start": 0, "num_tokens": 5}], "total_ns": 9}
    struct = pa.list_(pa.struct([("start", pa.int64()), ("num_tokens", pa.int64())]))
    schema = pa.schema([(name, struct if name == "prefills" else pa.int64()) for name in COLUMNS])
    pq.write_table(pa.Table.from_pylist([step, step | {field: value}], schema=schema), file)
    rewrite(file, asdict(manifest()))
    check_refused(file, f"p.parquet, {message}")


@pytest.mark.parametrize(
    ("num", "context", "longest", "repeated", "message"),
    [
        (8, 8, 1, 7, ""),
        (8, 7, 0, 0, "decode_context_tokens is 7 with 8 decodes; expected at least one for each, and 0 without any"),
        (1, 40_960, 40_960, 0, ""),
        (2, 10, 5, 5, ""),
        (2, 10, 4, 0, "longest_decode_context is 4 of 2 decodes that attend to 10 positions in all; expected from"),
        (2, 10, 11, 0, "longest_decode_context is 11 of 2 decodes"),
        (2, 10, 6, 5, "repeated_context_tokens is 5 of 10 positions, of which the longest .* 6; expected at most 4$"),
    ],
)
def test_contexts_of_decodes_fit_together(file, num, context, longest, repeated, message):
    chunks, numbers = (
        (PrefillChunk(0, 40_960),),
        {"longest_decode_context": longest, "repeated_context_tokens": repeated},
    )
    step = MeasuredStep(BatchShape(num, context, chunks, num + 1, **numbers), Spans(forward_ns=1_000_009), 9, 0)
    write_profile(file, manifest(), [step])
    if message:
        check_refused(file, f"row 0: {message}")
    else:
        assert read_profile(file).steps == [step]


@pytest.mark.parametrize("rope", [asdict(RopeScaling("linear", 4.0)), {"rope_type": "linear", "factor": 4.0}])
def test_contexts_have_the_length_of_the_model_stretched_or_not(file, rope):
    step = MeasuredStep(BatchShape(2, 2 * 50_000, (), 2), Spans(), 9, 0)
    write_profile(file, manifest(), [step])
    check_refused(file, r"decode_context_tokens is 100000 with 2 decodes; expected at most .* 40,960")
    write_profile(file, manifest(model={**manifest().model, "rope_scaling": rope}), [step])
    assert read_profile(file).steps == [step]


def test_a_profile_that_does_not_tell_how_long_sequences_may_be_has_any(file):
    told = ("max_position_embeddings", "rms_norm_eps", "rope_theta")
    model = {name: value for name, value in manifest().model.items() if name not in told}
    step = MeasuredStep(BatchShape(1, 10**6, (), 1), Spans(), 9, 0)
    write_profile(file, manifest(model=model), [step])
    assert read_profile(file) == (manifest(model=model), [step])


def test_a_profile_from_before_there_were_experts_is_one_of_a_model_without(file):
    old = {name: value for name, value in manifest().model.items() if name not in (*EXPERTS, "norm_topk_prob")}
    write_profile(file, manifest(model=old), STEPS[:1])
    same = {"device": "h100", "block_size": 16, "tensor_parallel_size": 1, "kv_dtype": None, "sliding_window": None}
    read_profile(file).manifest.check_matches("p", model=MODEL, **same)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 1}, "'format' is 1; expected 2"),
        ({"captured_decode": 8}, ".* unknown field 'captured_decode'; did you mean 'captured_decodes'"),
        ({"block_size": "16"}, "'block_size' is '16'; expected int"),
        ({"block_size": True}, "'block_size' is True; expected from 1 to "),
        ({"block_size": 0}, "'block_size' is 0; expected from 1 to "),
        ({"captured_tokens": -1}, "'captured_tokens' is -1; expected from 0 to "),
        ({"captured_tokens": 10**18}, "'captured_tokens' is 1000000000000000000; expected from 0 to "),
        ({"captured_decodes": None}, "'captured_decodes' is None; expected int"),
        ({"kv_dtype": 3}, "'kv_dtype' is 3; expected str or null"),
        ({"dtype": "int4"}, "'dtype' is 'int4'; expected one of float32, "),
        ({"model": manifest().model | {"rope_scaling": {"factor": 2}}}, "model.rope_scaling is .*; expected null, or "),
        ({"model": manifest().model | {"rope_scaling": "linear"}}, "model.rope_scaling is 'linear'; expected null, or"),
        ({"model": manifest().model | EXPERTS | {"num_experts": "8"}}, "model.num_experts is '8'; expected int"),
        ({"model": manifest().model | {"num_experts": 8}},
         "model.num_experts_per_tok is null; set all of num_experts, "),
        ({"model": manifest().model | {"rms_norm_eps": float("nan")}},
         "model.rms_norm_eps is nan; it must be a number"),
        ({"model": {"name": "x"}}, "'model' lacks architecture, hidden_size"),
        ({"device": None}, "'device' is None; expected str"),
    ],
)  # fmt: skip
def test_a_bad_manifest_is_named(file, change, message):
    write_profile(file, manifest(), STEPS[:1])
    rewrite(file, asdict(manifest()) | change)
    check_refused(file, f"p.parquet: {METADATA_KEY}: {message}")


def test_a_manifest_from_before_there_were_captured_steps_with_prompts_says_none(file):
    write_profile(file, manifest(captured_decodes=8, captured_tokens=64), STEPS[:1])
    assert read_profile(file).manifest.captured_tokens == 64
    rewrite(file, {key: value for key, value in asdict(manifest()).items() if not key.startswith("captured_")})
    assert read_profile(file).manifest == manifest()


def test_what_is_no_profile_is_refused(file):
    check_refused(file, r"no profile at .*p.parquet")
    fit = file.with_suffix(".json")
    fit.touch()
    check_refused(fit, r"p.json is no profile, which is a .parquet; if it is a fit, give it as cost.path=.*p.json$")
    with pytest.raises(ProfileError, match=r"^p: the manifest is \[\]; expected a JSON object"):
        ProfileManifest.from_json([], "p")
    file.write_text("not parquet")
    check_refused(file, r"p.parquet cannot be read as Parquet: .*[^.]; `testbed calibrate` makes one")
    pq.write_table(pa.table({"a": [1]}), file)
    check_refused(file, r"p.parquet is no profile: its metadata lacks 'testbed.profile'")
    pq.write_table(pa.table({"num_decodes": [1]}), file)
    rewrite(file, {"format": 2})
    check_refused(file, r"testbed.profile: the manifest lacks 'device'$")
    rewrite(file, asdict(manifest()))
    check_refused(file, r"p.parquet lacks the column 'decode_context_tokens' \(int64\); it has num")
    write_profile(file, manifest(), [])
    check_refused(file, r"p.parquet has no rows")
    pq.write_table(pq.read_table(file).set_column(0, "num_decodes", pa.array([], pa.float64())), file)
    check_refused(file, "column 'num_decodes' is of type double; expected int32")


def test_a_failed_write_leaves_nothing(file):
    step = MeasuredStep(BatchShape(0, 0, (PrefillChunk(0, 1),), 0), Spans(), "x")  # type: ignore[arg-type]
    with pytest.raises(Exception, match="x"):
        write_profile(file, manifest(), [step])
    assert not list(file.parent.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": replace(MODEL, name="big", hidden_size=4096)},
         r"f is of model 'small' \(hidden_size 1024\), and the run's is 'big' \(hidden_size 4096\)"),
        ({"model": replace(MODEL, dtype="float32")},
         r"'small' \(dtype bfloat16\), .* 'small' \(dtype float32\); set model.dtype=bfloat16, or measure"),
        ({"model": replace(MODEL, dtype="float32", path="/models/small")},
         r"\(dtype float32\); give a copy of config.json with \"dtype\": \"bfloat16\", or measure"),
        ({"model": replace(MODEL, dtype="fp8")}, r"\(dtype fp8\); choose the model that was profiled, or measure"),
        ({"model": replace(MODEL, **EXPERTS)},
         r"'small' \(num_experts null\), .* 'small' \(num_experts 8\); choose"),
        ({"device": "a100"}, "f was measured with device h100, and the run has a100; set device=h100"),
        ({"block_size": 32}, "block_size 16, and the run has 32; set cache.block_size=16"),
        ({"tensor_parallel_size": 2}, "and the run has 2; set device.tensor_parallel_size=1"),
        ({"kv_dtype": "fp8"}, "kv_dtype bfloat16, and the run has fp8"),
        ({"sliding_window": 9}, "sliding_window null, and the run has 9; set cache.sliding_window=null"),
    ],
)  # fmt: skip
def test_a_profile_of_something_else_is_refused_and_both_are_named(change, message):
    same = {"model": replace(MODEL, name="another name"), "device": "h100", "block_size": 16,
            "tensor_parallel_size": 1, "kv_dtype": None, "sliding_window": None}  # fmt: skip
    manifest().check_matches("f", **same)
    with pytest.raises(ConfigError, match=message):
        manifest().check_matches("f", **{**same, **change})
    manifest(kv_dtype="fp8").check_matches("f", **{**same, "kv_dtype": "fp8"})
