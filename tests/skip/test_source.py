"""Sources as the engine reads them: checked, with errors that say where, and one read ahead of the work."""

import gc
import threading
import time
import weakref

import pytest
import torch

from backdrop import Source
from backdrop._source import ReadAhead, check_source, read_region, read_rows


class Held(Source):
    """A tensor, and how a read goes wrong."""

    def __init__(self, values, changed=lambda found: found, **said):
        self.values, self.changed = values, changed
        self.shape, self.dtype = said.get("shape", tuple(values.shape)), said.get("dtype", values.dtype)

    def read(self, sample, low, high):
        where = [slice(a, b) for a, b in zip(low, high, strict=True)]
        return self.changed(self.values[(sample, slice(None), *where)])


X = torch.arange(2.0 * 3 * 5 * 7).view(2, 3, 5, 7)


def fail(found):
    raise OSError("the disk is gone")


def test_a_region_and_rows():
    assert torch.equal(read_region(Held(X), 1, (1, 2), (4, 7)), X[1, :, 1:4, 2:7])
    assert torch.equal(read_rows(Held(X), torch.tensor([1, 0, 1])), X[[1, 0, 1]])
    assert read_rows(Held(X), []).shape == (0, 3, 5, 7)
    table = X.flatten(1)
    assert torch.equal(read_rows(Held(table), [1]), table[1:])
    assert len(Held(X)) == 2
    assert repr(Held(X)) == "Held(shape=(2, 3, 5, 7), dtype=torch.float32)"


def test_nothing_is_recorded_for_gradients():
    weight = torch.ones((), requires_grad=True)
    assert not read_region(Held(X, lambda found: found * weight), 0, (0, 0), (1, 1)).requires_grad
    assert not read_region(Held(X.clone().requires_grad_()), 0, (0, 0), (1, 1)).requires_grad


REFUSED = [
    (lambda found: found[..., :-1], ValueError, ["sample 1, [1:4, 2:7] of Held(shape=", "(3, 3, 5)", "(3, 3, 4)"]),
    (lambda found: found[None], ValueError, ["sample 1, [1:4, 2:7]", "(1, 3, 3, 5)"]),
    (torch.Tensor.double, TypeError, ["sample 1, [1:4, 2:7]", "torch.float32", "torch.float64"]),
    (torch.Tensor.tolist, TypeError, ["sample 1, [1:4, 2:7]", "a tensor", "list"]),
    (fail, RuntimeError, ["sample 1, [1:4, 2:7] of Held(", "OSError: the disk is gone"]),
]


@pytest.mark.parametrize(("changed", "kind", "parts"), REFUSED)
def test_a_bad_read_names_source_sample_and_region(changed, kind, parts):
    with pytest.raises(kind) as caught:
        read_region(Held(X, changed), 1, (1, 2), (4, 7))
    assert [part for part in parts if part not in str(caught.value)] == []
    with pytest.raises((kind, RuntimeError), match=r"samples 1, 0 of Held\("):
        read_rows(Held(X, changed), [1, 0])


def test_a_failed_read_keeps_its_cause():
    with pytest.raises(RuntimeError) as caught:
        read_region(Held(X, fail), 0, (0, 0), (1, 1))
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("sample", "low", "high"),
    [(2, (0, 0), (1, 1)), (-1, (0, 0), (1, 1)), (0, (0, 0), (6, 1)), (0, (-1, 0), (1, 1)), (0, (0,), (1,))],
)
def test_regions_lie_within_the_sample(sample, low, high):
    with pytest.raises(IndexError, match=r"sample .* of Held\(.* does not lie in its shape, \(2, 3, 5, 7\)"):
        read_region(Held(X), sample, low, high)


@pytest.mark.parametrize("rows", [[2], [-1]])
def test_rows_lie_within_the_source(rows):
    with pytest.raises(IndexError, match=r"samples -?\d of Held"):
        read_rows(Held(X), rows)


@pytest.mark.parametrize(
    ("said", "kind", "parts"),
    [
        ({"shape": None}, TypeError, ["Held.shape", "(samples, channels, *space)", "None"]),
        ({"shape": (1.0, 2)}, TypeError, ["Held.shape", "whole numbers"]),
        ({"shape": (5,)}, ValueError, ["Held.shape", "(5,)"]),
        ({"shape": (1, 0, 5)}, ValueError, ["Held.shape", "at least 1"]),
        ({"dtype": "float32"}, TypeError, ["Held.dtype", "torch.dtype", "'float32'"]),
    ],
)
def test_what_a_source_says_of_itself_is_checked(said, kind, parts):
    with pytest.raises(kind) as caught:
        check_source(Held(X, **said))
    assert [part for part in parts if part not in str(caught.value)] == []
    assert check_source(source := Held(X)) is source


def test_a_source_has_to_say_how_it_is_read():
    class Without(Source):
        pass

    with pytest.raises(TypeError, match="read"):
        Without()


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_reading_ahead_keeps_the_order_and_its_bound(ahead):
    begun, most = [], 0
    with ReadAhead(lambda key: begun.append(key) or key, range(20), ahead=ahead) as found:
        for i, value in enumerate(found):
            assert value == i
            time.sleep(0.002)  # for the thread to run as far as it may
            most = max(most, len(begun) - i - 1)
    assert begun == list(range(20))
    assert most <= ahead


def test_the_next_read_goes_on_beside_the_work():
    at_work, begun = threading.Event(), threading.Event()

    def read(key):
        if key:
            assert at_work.wait(20)
            begun.set()
        return key

    with ReadAhead(read, range(2)) as found:
        assert next(found) == 0
        at_work.set()
        assert begun.wait(20)  # while nobody asks for it
        assert next(found) == 1
        assert next(found, None) is None


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("backdrop-read-ahead")]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_an_error_in_the_work_ends_the_reading(error):
    read = []

    def work():
        with ReadAhead(lambda key: read.append(key) or key, range(1000)) as found:
            for value in found:
                if value == 2:
                    raise error

    with pytest.raises(error):
        work()
    assert readers() == []
    assert len(read) <= 4


def test_an_error_in_a_read_is_raised_in_its_turn():
    def read(key):
        if key == 2:
            raise OSError("gone")
        return key

    seen = []
    with pytest.raises(OSError, match="gone"), ReadAhead(read, range(9)) as found:
        seen.extend(found)
    assert seen == [0, 1]
    assert readers() == []


def test_an_error_in_the_keys_is_raised_too():
    def keys():
        yield 0
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"), ReadAhead(abs, keys()) as found:
        list(found)
    assert readers() == []


def test_what_was_read_is_let_go():
    alive = weakref.WeakSet()

    def read(key):
        value = torch.zeros(1)
        alive.add(value)
        return value

    with ReadAhead(read, range(50)) as found:
        for i, value in enumerate(found):
            del value
            if i == 25:
                gc.collect()
                assert len(alive) <= 2


def test_outside_of_its_block_it_says_so():
    ahead = ReadAhead(abs, [1])
    with pytest.raises(RuntimeError, match="with block"):
        next(ahead)
