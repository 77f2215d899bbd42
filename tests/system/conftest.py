"""Fixtures that several system tests share: a disk whose power can be cut, and a cluster of Spark."""

import pytest


@pytest.fixture(scope="session")
def power_can_be_cut():
    """Skip, with the reason, where there is no disk whose power can be cut."""
    from ackstate.analysis.crash.power_cuts import LoopDisk, private_mounts
    from ackstate.analysis.crash.runs import LayerSkippedError

    try:
        with private_mounts(), LoopDisk() as disk:
            disk.cut_power()
    except LayerSkippedError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def spark_cluster(tmp_path_factory):
    """Yield the URL of a master with two workers, and the workers."""
    from spark_daemons import two_workers

    with two_workers(tmp_path_factory.mktemp("cluster")) as found:
        yield found
