"""Run other tools beside mha-inspect on one model, and print what each costs in plain forwards.

`pip install torchinfo torchlens bertviz transformers`, then `python tests/benchmarks/tools.py`. What is missing is
left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module

import torch
import transformers

import mha_inspect

TOKENS = 64
SIZES = {"n_layer": 12, "n_embd": 256, "n_head": 8, "attn_implementation": "eager"}


def fastest(run: Callable[[], object], times: int = 3) -> float:
    """The fewest seconds of several runs, after one that is not counted."""
    run()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    torch.set_num_threads(1)
    model = transformers.GPT2Model(transformers.GPT2Config(**SIZES)).eval()
    ids = torch.randint(0, 1000, (1, TOKENS))
    labels = [str(place) for place in range(TOKENS)]
    tools: dict[str, Callable[[], object]] = {
        "mha-inspect trace": lambda: mha_inspect.trace(model, ids),
        "mha-inspect params": lambda: mha_inspect.params(model, ids),
        "torchinfo": lambda: import_module("torchinfo").summary(model, input_data=ids, verbose=0),
        "torchlens": lambda: import_module("torchlens").trace(model, ids),
        "bertviz": lambda: import_module("bertviz").head_view(
            model(ids, output_attentions=True).attentions, labels, html_action="return"
        ),
    }
    with torch.no_grad():
        plain = fastest(lambda: model(ids), 10)
        print(f"plain forward: {1000 * plain:.0f} ms")
        for name, run in tools.items():
            try:
                print(f"{name}: {fastest(run) / plain:.0f}")
            except ImportError as error:
                print(f"{name}: not installed ({error})")


if __name__ == "__main__":
    main()
