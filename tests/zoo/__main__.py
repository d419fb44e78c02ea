"""Judge every configuration, and print what was found: `python -m zoo [--quick] [WORDS]` in tests."""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter

import torch

from . import configurations
from .oracle import judge

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
words = sys.argv[1:]
quick = "--quick" in words
counts: dict[str, Counter[str]] = {}
for own in configurations([word for word in words if word != "--quick"]):
    library = own.name.partition(":")[0]
    began = time.process_time()
    try:
        found = judge(own, thorough=not quick)
        verdict = found.verdict
    except Exception as error:
        import traceback

        last = traceback.extract_tb(error.__traceback__)[-1]
        found, verdict = None, "not run"
        print(f"not run    {own.name}: {type(error).__name__}: {error} ({last.filename.rpartition('/')[2]}:{last.lineno})"[:400], flush=True)
    counts.setdefault(library, Counter())[verdict] += 1
    if found is not None and (verdict != "right" or found.refused):
        print(f"{verdict:<10} {own.name} ({time.process_time() - began:.1f} s)", flush=True)
        for level in ("crash", "wrong", "incomplete", "refused"):
            for line in list(dict.fromkeys(getattr(found, level)))[:6]:
                print(f"           {level}: {line}", flush=True)
total: Counter[str] = Counter()
for library, one in counts.items():
    total += one
    print(f"{library:<40} {sum(one.values()):>4}  {dict(one)}")
print(f"{'all':<40} {sum(total.values()):>4}  {dict(total)}")
