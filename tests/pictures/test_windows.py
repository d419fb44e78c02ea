"""A window of an image is drawn like a batch item."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mha_inspect import trace
from mha_inspect.naming.canonical import drawn_of
from mha_inspect.pictures.stages import Attended

HEADS, WIDTH, WINDOW = 3, 24, 4


class Windows(nn.Module):
    """Windows of 4 × 4 places attend within themselves: `batch height width features`."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        y = x.view(b, h // WINDOW, WINDOW, w // WINDOW, WINDOW, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, WINDOW**2, c)
        q, k, v = self.qkv(y).view(*y.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = self.proj(((q @ k.mT / 8**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return y.view(b, h // WINDOW, w // WINDOW, WINDOW, WINDOW, c).permute(0, 1, 3, 2, 4, 5).reshape(x.shape)


def test_the_weights_of_a_window_are_drawn() -> None:
    from mha_inspect.running.subject import Subject

    module, x = Windows().eval(), torch.randn(2, 8, 8, WIDTH)
    run = Subject(module, (x,), {}).recorded(keep=True)
    ((attention, names),) = run.attentions
    assert names.num_windows == 4
    contents = drawn_of(run, attention, names)
    assert contents["weights"].shape == (8, HEADS, 16, 16)
    attended = Attended("", HEADS, HEADS, lambda: contents, num_windows=names.num_windows)
    picture = attended.picture("weights", batch_row=5)
    assert picture.notes == ("Window 1 of 4 of batch item 1 of 2, counted from 0.",)
    # The numbers are those of the second window of the second item.
    weights = trace(module, x, keep=True).attentions[0].weights.tensor
    assert torch.equal(torch.as_tensor(picture.values), weights.reshape(8, HEADS, 16, 16)[5])
