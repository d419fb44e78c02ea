"""The corpus: each module of the tests is here once, as data, with what is true of it. Properties run over all of it.

A case is added where its kind is, and no test is written for it:

- A right module: `@attends(...)`, `register` or `has_none` (`entry.py`), in the file of its topic. What is true of it
  is a `Truth`: heads, axes of each stage, scale, whose the rows of parameters are, kind, position; further its twin,
  which computes the same with the same parameters, and the intent that is meant. `test_truth`, `test_numbers`,
  `test_parameters` and `test_check` ask all of them.
- One softmax, written in another way: a function in `spellings.py` and its `Meaning`.
- A mistake that runs, beside its right twin: a `Case` in `planted.py` or `wrong_*.py`, with the check that is to find
  it and the smallest intent that tells it. `test_planted`: each is found, and no twin is accused.
- A mistake of one line in an idiom: a row of `mutants.py`.
- A call that raises: `Failing` in `failing.py`, with its cause, what its fix has to have, and the mended call.
- Two modules side by side: `Pair` in `pairs.py`, with the outcome, the kinds of the reasons, and the first stage.
- Two files of weights: `Files` in `checkpoints.py`, with what each tensor's verdict is.
- What is expected and not yet so: `not_yet.py`, with the reason. Nothing false may be said of it.

Truth is a textbook's, torch's or a float64 computation's, never what the program said: shapes, axes, numbers and
verdicts are asserted. What is said in words is in the snapshots of `test_pages.py`, a page a case; after a change of
words, `pytest tests/corpus/test_pages.py --snapshot-update` writes them, and the diff is read before the commit.

`python -m tests.mutate` changes the package, an operator at a time, and prints what these properties do not see.

What imports this module has all entries registered.
"""

from __future__ import annotations

from importlib import import_module

from .entry import ENTRIES as ENTRIES
from .entry import entries as entries

KINDS = """base separate packed grouped loops windows positions weighing
    variants inside claims published owned idioms items near""".split()  # noqa: SIM905

for kind in KINDS:
    import_module(f".{kind}", __package__)
