"""A grid on a Ray cluster of a head and two workers, of which one is killed midway."""

from __future__ import annotations

import threading
import time

import pytest
from rich.console import Console

from acclimate.data.catalog import Selection
from acclimate.data.streams import Stream
from acclimate.evaluation.grid import Execution, run_grid
from acclimate.evaluation.journal import latest_record
from acclimate.evaluation.progress import ProgressView
from acclimate.evaluation.store import Store
from acclimate.evaluation.testbed import open_testbed

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'acclimate[ray]'")

IMPATIENT = {  # by default a machine is missed after a minute
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


def grid(store=None, **options):
    testbed = open_testbed(selection=Selection(corruptions=["fog", "snow"], images=480))
    streams = [Stream(domain, batch_size=16) for domain in testbed.data.domains]
    methods = {"tent": {"lr": 0.05}, "dct": {"lr": 0.05}}
    outcomes = run_grid(testbed, streams, methods, store=store, console=Console(quiet=True), execution=Execution(**options))
    return {outcome.spec.id: outcome.result.digest for outcome in outcomes}


def test_a_cluster_that_loses_a_machine_gives_the_same_results(tmp_path):
    from ray.cluster_utils import Cluster

    alone = grid()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": IMPATIENT})
    try:
        victim = cluster.add_node(num_cpus=1)
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        store, begun = Store(tmp_path, every=0.2), []

        def kill_when_both_work() -> None:
            while not begun:
                steps = [line["step"] for folder in tmp_path.glob("*-*") if (line := latest_record(folder))]
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
    testbed = open_testbed(selection=Selection(corruptions=["clean"], images=16))
    stream = Stream(testbed.data.domains, batch_size=8)
    here, there = (
        run_grid(testbed, [stream], {"tent": {}}, execution=Execution(on=on), console=Console(quiet=True))
        for on in (None, "ray")
    )
    assert here[0].result.digest == there[0].result.digest
    assert not ray.is_initialized(), "what was started is stopped"


def test_interrupted_runs_save_their_states(tmp_path, monkeypatch):
    testbed = open_testbed(selection=Selection(corruptions=["fog"], images=4000))
    stream, store = Stream(testbed.data.domains, batch_size=8), Store(tmp_path)

    def poll(self, running):
        if any(latest_record(folder) for folder in tmp_path.glob("*-*")):
            raise KeyboardInterrupt

    monkeypatch.setattr(ProgressView, "poll", poll)
    with pytest.raises(KeyboardInterrupt):
        run_grid(testbed, [stream], {"tent": {}}, store=store, execution=Execution(on="ray"), console=Console(quiet=True))
    (state,) = tmp_path.glob("*/state.safetensors")  # saved at the interruption, because 30 seconds have not passed
    assert 0 < latest_record(state.parent)["step"] < len(stream)
    assert not ray.is_initialized()
