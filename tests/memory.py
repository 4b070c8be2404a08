"""How much memory tensors take at most, counted by what is made and freed; the same in every run."""

import weakref

from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """The most bytes that tensors made while this is open hold at once. The backward pass counts too.

    What an operation takes while it runs is not seen.
    """

    def __init__(self):
        super().__init__()
        self.bytes = self.now = 0
        self.known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {self._key(x) for x in tree_leaves((args, kwargs or {})) if hasattr(x, "untyped_storage")}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if hasattr(leaf, "untyped_storage") and self._key(leaf) not in before | self.known.keys():
                self._add(leaf.untyped_storage())
        return out

    @staticmethod
    def _key(tensor):
        return tensor.untyped_storage()._cdata

    def _add(self, storage):
        key, size = storage._cdata, storage.nbytes()
        self.now += size
        self.bytes = max(self.bytes, self.now)
        self.known[key] = weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key, size):
        self.now -= size
        self.known.pop(key, None)


def peak_of(run, release=lambda: None):
    """The most bytes that torch has in use on a CPU while this runs a second time, by its own count.

    `release` frees what the first time has left, such as gradients: whether the count takes notice of memory that goes
    but came before it began is a matter of chance.
    """
    run()
    release()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    now = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most
