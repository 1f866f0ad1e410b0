"""Of the notes of many runs one of each kind is told: the worst."""

from __future__ import annotations

from analysis.measures.notes import Note, doubts_of, told


def manifest(num: int) -> dict[str, object]:
    lag = {"num_late": 9 - num, "num_arrivals": 10, "notes": [f"REPLAY LAG: {9 - num} of 10 arrivals"]}
    cost_notes = [f"EXTRAPOLATED STEP TIMES: {num} of 100 steps: {'decode' * num}", f"prices: {num} % is measured"]
    return {"cost_notes": cost_notes, "num_extrapolated_steps": num, "num_steps": 100, "replay": lag}


def test_of_notes_with_other_numbers_the_worst_is_told():
    found = told((f"seed={num}", note) for num in (3, 7, 5) for note in doubts_of(manifest(num)))
    assert [(one.where, one.num, one.rank, one.note.text.partition(":")[0]) for one in found] == [
        ("seed=7", 3, "worst", "EXTRAPOLATED STEP TIMES"),
        ("seed=3", 3, "first", "prices"),
        ("seed=3", 3, "worst", "REPLAY LAG"),
    ]


def test_equal_sentences_have_no_worst_and_others_stand_by_themselves():
    texts = ("no effect: 7", "rate set from 1.5 to 2", "rate set from 2,000 to 2", "no effect: 7")
    found = told((str(number), Note.of_text(text)) for number, text in enumerate(texts))
    assert [(one.note.text, one.num, one.rank) for one in found] == [
        ("no effect: 7", 2, ""),
        ("rate set from 1.5 to 2", 2, "first"),
    ]


def test_manifests_of_older_runs_have_notes_without_a_size():
    (note,) = doubts_of({"cost_notes": ["EXTRAPOLATED STEP TIMES: of some"], "replay": None})
    assert (note.kind, note.size) == ("EXTRAPOLATED STEP TIMES", None)
