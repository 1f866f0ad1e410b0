"""Decision digests that were written down, and that every later core must decide again, interpreted or compiled.

A digest sums up every decision of a run (testbed/core/digest.py). Four kinds of runs are kept here:

    worlds.py          2,000 random lives of a scheduler (world.py: one)     worlds.txt, setups.jsonl.gz
    configurations.py  whole simulated runs, as `testbed run` has them       configurations.jsonl
    oracle_cases.py    cases that real schedulers logged, as `conform` does  oracle_cases.txt
    tapes.py           tapes of runs of the CPU engine, as `parity` does     tapes/<name>/

Files of other people are found as elsewhere in the tests: TESTBED_TRACES names a folder with public traces (azure,
mooncake), TESTBED_ORACLES one with the logged cases. What needs them is skipped where they are absent.

    python -m tests.golden.worlds                 writes all digests anew; the configurations of the worlds stay
    python -m tests.golden.worlds --check         names the worlds that are decided otherwise
    python -m tests.golden.worlds --world 17      prints a world step by step: do it in two trees, and diff
    python -m tests.golden.configurations         writes anew; also --check, and --run NAME for one
    python -m tests.golden.oracle_cases           writes anew; also --check
    python -m tests.golden.tapes                  runs the engine again (needs torch), and writes its tapes

When may they be written anew? Only where a rule changes on purpose, and the commit says which rule, and how many of the
digests it changes. A digest that changes with a refactoring, a faster path or a build is a bug in that. What a world is
made of is data (setups.jsonl.gz), or drawn here and in `tests.properties.setups.random_request`; a test tells "drawn
otherwise" from "decided otherwise".

A digest knows no physical block ids, but in worlds with the flag `o` they decide (which block of equals is evicted
first). With shuffled free lists 4 of 2,000 worlds differ, all of that kind: a core that hands out ids in another order
may change a few of these, and no other.

They were written by the core that still jumped over steps (2a7e2e8), but for 40 worlds. `unified` now computes the
members of a group wherever they stand in running order (they starved behind unfinished prefills), and passes over one
that the budget left cannot hold; a block that a window released writes no `last_step` onto the table's last block. With
the old rules in the new core all were as before but three: 428 and 594, of the kind above, and 1498, where a group
ended the budget of the old core's second way to decode.

The configurations were written anew when the roofline got its tiles, floors and links: their steps take another time,
so 51 of 53 are decided otherwise, by the same rules (worlds, oracle cases and tapes, which know no prices, stayed).
"""
