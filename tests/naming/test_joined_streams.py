"""Two sequences that are joined, attended and cut again: what is returned has the names of the stages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mha_inspect

WIDTH, HEADS, IMAGE, TEXT = 24, 4, 7, 5


class Joint(nn.Module):
    """Joint attention as in SD3 and Flux: each stream has projections of its own."""

    def __init__(self, *, text_first: bool) -> None:
        super().__init__()
        self.text_first = text_first
        self.of_image, self.of_text = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.image_out, self.text_out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.image_mlp, self.text_mlp = (
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 31), nn.GELU(), nn.Linear(31, WIDTH)) for _ in range(2)
        )

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        streams = [self.of_image(image), self.of_text(text)]
        if self.text_first:
            streams.reverse()
        heads = [stream.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4) for stream in streams]
        q, k, v = torch.cat(heads, dim=3)
        context = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        pieces = list(context.split([stream.shape[1] for stream in streams], dim=1))
        if self.text_first:
            pieces.reverse()
        image, text = image + self.image_out(pieces[0]), text + self.text_out(pieces[1])
        return image + self.image_mlp(image), text + self.text_mlp(text)


@pytest.mark.parametrize("text_first", [False, True])
def test_both_streams_have_the_names_of_the_stages(text_first: bool) -> None:
    module = Joint(text_first=text_first).eval()
    trace = mha_inspect.trace(module, torch.randn(2, IMAGE, WIDTH), torch.randn(2, TEXT, WIDTH))
    (attention,) = trace.attentions
    assert attention.scores.shape == (2, HEADS, IMAGE + TEXT, IMAGE + TEXT)
    assert attention.output.axes == "batch positions embed"
    assert [(returned.shape, returned.axes) for returned in trace.returns] == [
        ((2, IMAGE, WIDTH), "batch positions embed"),
        ((2, TEXT, WIDTH), "batch positions embed"),
    ]
