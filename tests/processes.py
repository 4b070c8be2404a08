"""Runs a function in several processes that form a torch.distributed group over gloo.

They are forked from a server that has imported torch already.
"""

import datetime
import io
import os
import queue
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from spawned import CONTEXT


def run(function, world, *args, timeout=60):
    """What `function(rank, *args)` returns in each of `world` processes, by rank; None for one that dies."""
    results = CONTEXT.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        workers = [
            CONTEXT.Process(target=_work, args=(function, rank, world, str(store), timeout, results, args))
            for rank in range(world)
        ]
        try:
            for worker in workers:
                worker.start()
            found = {}
            while len(found) < world:
                waiting = [rank for rank in range(world) if rank not in found]
                try:
                    rank, error, data = results.get(timeout=2)
                except queue.Empty:
                    found.update({rank: None for rank in waiting if workers[rank].exitcode not in (None, 0)})
                    continue
                assert error is None, f"process {rank} failed:\n{error}"
                found[rank] = torch.load(io.BytesIO(data))
            for worker in workers:
                worker.join(timeout)
        finally:
            for worker in workers:
                worker.kill()
    return [found[rank] for rank in range(world)]


def _work(function, rank, world, store, timeout, results, args):
    error, data = None, io.BytesIO()
    try:
        torch.set_num_threads(1)
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
        torch.save(function(rank, *args), data)
        dist.barrier()  # so that none leaves while others wait for its part
    except Exception:
        error = traceback.format_exc()
    results.put((rank, error, data.getvalue()))
    results.close()
    results.join_thread()
    os._exit(0)  # with old versions of torch, taking the group down may wait forever
