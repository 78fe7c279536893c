"""A grid on a Ray cluster of a head and two workers, of which one is killed midway."""

from __future__ import annotations

import threading
import time

import pytest
from rich.console import Console

from acclimate.data import bundled
from acclimate.data.datasets import Corrupted
from acclimate.data.streams import Stream
from acclimate.evaluation.grid import sweep
from acclimate.evaluation.journal import latest
from acclimate.evaluation.store import Store

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'acclimate[ray]'")

IMPATIENT = {  # by default a machine is missed after a minute
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


def grid(store=None, **options):
    pictures = bundled.images().sample(480)
    how = dict(mean=bundled.MEAN, std=bundled.STD, constants=bundled.CONSTANTS)
    streams = [Stream(Corrupted(pictures, name, 2, **how), batch_size=16) for name in ("fog", "snow")]
    methods = {"tent": {"lr": 0.05}, "dct": {"lr": 0.05}}
    outcomes = sweep(
        bundled.model(), streams, methods, model_name="bundled", store=store, console=Console(quiet=True), **options
    )
    return {outcome.spec.id: outcome.result.digest for outcome in outcomes}


def test_a_cluster_that_loses_a_machine_gives_the_same_results(tmp_path):
    from ray.cluster_utils import Cluster

    alone = grid()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": IMPATIENT})
    try:
        victim = cluster.add_node(num_cpus=2)
        cluster.add_node(num_cpus=2)
        ray.init(address=cluster.address, log_to_driver=False)
        store, begun = Store(tmp_path, every=0.2), []

        def kill_when_both_work() -> None:
            while not begun:
                steps = [line["step"] for folder in tmp_path.glob("*-*") if (line := latest(folder))]
                if len(steps) >= 2 and min(steps) >= 3:
                    begun.append(steps)
                    cluster.remove_node(victim, allow_graceful=False)
                time.sleep(0.05)

        killer = threading.Thread(target=kill_when_both_work, daemon=True)
        killer.start()
        assert grid(store, on="ray") == alone
        killer.join(1)
        assert begun, "no machine was lost"
        assert grid(store, on="ray") == alone, "and now they are all found"
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_without_a_cluster_one_is_started_here(tmp_path):
    assert not ray.is_initialized()
    pictures = bundled.images().sample(16)
    stream = Stream(Corrupted(pictures, mean=bundled.MEAN, std=bundled.STD), batch_size=8)
    common = dict(model_name="bundled", console=Console(quiet=True))
    here, there = (sweep(bundled.model(), [stream], {"tent": {}}, on=on, **common) for on in (None, "ray"))
    assert here[0].result.digest == there[0].result.digest
    assert not ray.is_initialized(), "what was started is stopped"
