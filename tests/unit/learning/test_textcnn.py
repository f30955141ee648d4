"""The text CNN: pieces, fixed shapes and the short gradient change nothing."""

import pytest
import torch
from torch import Tensor

from atoll.core.rng import Stream
from atoll.core.rows import Bounds, pieces
from atoll.learning import textcnn
from atoll.learning.textcnn import (
    KERNELS,
    TextCNN,
    Words,
    document_means,
    extremes,
    highest,
    normal,
)


def words(count: int = 30, dimension: int = 6) -> Words:
    table = normal((count, dimension), 1.0, Stream.of(0, "table")).double()
    table[0] = 0
    known = torch.arange(count) > 4
    return Words("made up", table, known)


def texts(rows: int = 9, length: int = 40, count: int = 30, seed: int = 0) -> Tensor:
    """Texts of all lengths, an empty one among them."""
    generator = Stream.of(seed, "texts").numpy()
    x = torch.from_numpy(generator.integers(1, count, (rows, length))).int()
    for row, end in enumerate(generator.integers(1, length // 2, rows)):
        x[row, end:] = 0
    x[0] = 0
    return x


def banks(members: int = 0) -> list[Tensor]:
    lead = (members,) if members else ()
    return [
        normal((*lead, 4, 6, size), 1.0, Stream.of(1, size)).double().requires_grad_()
        for size in KERNELS
    ]


def plainly(table: Words, x: Tensor, filters: Tensor) -> Tensor:
    """All windows of the text as it is, padding and all."""
    return torch.conv1d(table.table[x.long()].transpose(1, 2), filters).max(-1).values


def test_a_batch_that_is_cut_gives_the_same_values_and_gradients() -> None:
    table, x, found = words(), texts(), banks()
    said = highest(table, x, found)
    for values, filters in zip(said, found, strict=True):
        wanted = plainly(table, x, filters)
        torch.testing.assert_close(values, wanted)
        weigh = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).view_as(wanted)
        (short,) = torch.autograd.grad((values * weigh).sum(), filters, retain_graph=True)
        (long,) = torch.autograd.grad((wanted * weigh).sum(), filters)
        torch.testing.assert_close(short, long)


@pytest.mark.parametrize("length", [3, 5, 7, 16, 20, 21, 22, 40])
def test_texts_of_the_whole_length_have_no_window_of_padding(length: int) -> None:
    """Of a text that ends less than a window before the end no more windows are taken than are."""
    table, found = words(), banks()
    x = texts(9, 40)[:, :length]
    x[1], x[2, :-1] = 3, 4  # one of full length, one that is a word shorter
    wide = torch.nn.functional.pad(x, (0, max(0, 5 - length)))  # filled up to one window
    for values, filters in zip(highest(table, x, found), found, strict=True):
        torch.testing.assert_close(values, plainly(table, wide, filters))


def test_a_text_has_the_pieces_that_its_words_and_one_window_of_padding_fill() -> None:
    x = torch.zeros((4, 50), dtype=torch.int32)
    x[1, :15], x[2, :16], x[3, 49] = 2, 2, 2
    assert pieces(x).tolist() == [1, 1, 2, 4]


@pytest.mark.parametrize("cells", [1, 60, 10_000])
def test_texts_in_parts_give_the_same(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table, x, found = words(), texts(), banks()
    wanted = highest(table, x, found)
    monkeypatch.setattr(textcnn, "CELLS", {"cpu": cells})
    with torch.no_grad():
        for here, there in zip(highest(table, x, found), wanted, strict=True):
            torch.testing.assert_close(here, there)
        both = extremes(table, x, found)
    for values, filters in zip(both, found, strict=True):
        torch.testing.assert_close(values[:, :4], plainly(table, x, filters))
        torch.testing.assert_close(values[:, 4:], -plainly(table, x, -filters))


def test_members_of_a_stack_give_what_each_gives_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    table, found = words(), banks(members=3)
    x = torch.stack([texts(seed=seed) for seed in range(3)])
    said = highest(table, x, found)
    together = torch.autograd.grad(torch.cat(said, -1).square().sum(), found)
    for member in range(3):
        alone = [f[member].detach().requires_grad_() for f in found]
        one = highest(table, x[member], alone)
        gradients = torch.autograd.grad(torch.cat(one, -1).square().sum(), alone)
        for place in range(len(KERNELS)):
            torch.testing.assert_close(said[place][member], one[place])
            torch.testing.assert_close(together[place][member], gradients[place])
    monkeypatch.setattr(textcnn, "CELLS", {"cpu": 100})
    with torch.no_grad():
        for here, there in zip(highest(table, x, found), said, strict=True):
            torch.testing.assert_close(here, there)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("members", [0, 3])
def test_with_fixed_shapes_texts_give_the_same(
    members: int, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph cannot look how long texts are and which words they have: bounds say it."""
    table, found = words(), banks(members)
    x = torch.stack([texts(seed=seed) for seed in range(max(1, members))])
    bounds = Bounds(int(pieces(x).sum()) + 3, 33) if known else None
    x = x if members else x[0]
    wanted = highest(table, x, found)
    gradients = torch.autograd.grad(torch.cat(wanted, -1).square().sum(), found)
    monkeypatch.setattr(textcnn, "_capturing", lambda x: True)
    said = highest(table, x, found, bounds)
    again = torch.autograd.grad(torch.cat(said, -1).square().sum(), found)
    for here, there in zip([*said, *again], [*wanted, *gradients], strict=True):
        torch.testing.assert_close(here, there)


def test_no_rows_give_no_values() -> None:
    with torch.no_grad():
        assert highest(words(), texts()[:0], banks())[0].shape == (0, 4)


def test_the_mean_of_a_text_is_over_known_words_alone() -> None:
    table = words()
    x = torch.tensor([[5, 2, 7, 0], [2, 3, 0, 0], [0, 0, 0, 0]])  # 2 and 3 are not known
    found = document_means(table, x)
    torch.testing.assert_close(found[0], (table.table[5] + table.table[7]) / 2)
    assert not found[1:].any()


def test_a_normal_draw_is_cut_at_two_deviations_and_has_the_deviation_asked_for() -> None:
    draw = normal((200, 200), 0.5, Stream.of(3))
    assert float(draw.std()) == pytest.approx(0.5, rel=0.01)
    assert float(draw.abs().max()) <= 2 * 0.5 / textcnn.TRUNCATED + 1e-6


def test_word_vectors_are_no_weights() -> None:
    model = TextCNN(words(), 4, 2, Stream.of(0))
    assert set(model.state_dict()) == {
        *(f"conv{size}" for size in KERNELS), *(f"bias{size}" for size in KERNELS), "weight", "bias"
    }  # fmt: skip
    assert "made up" in repr(model)
