"""Converts a version as soon as it is published, if readers had the version before converted."""

from __future__ import annotations

import logging

from raytorchrpc.patterns.weights.snapshots import Snapshot, SnapshotPool
from raytorchrpc.process import threads
from raytorchrpc.tensors.cuda_streams import own_streams

logger = logging.getLogger(__name__)

#: Tensors that are converted at once. Other conversions wait for them.
_AT_ONCE = 32
_NO_RANK = -1


def convert_ahead(snapshot: Snapshot, before: Snapshot, pool: SnapshotPool) -> None:
    """Begin to convert a snapshot, on a thread, as readers asked for the one before. Quick.

    At most one version is converted for nobody: the one after the last that was asked for. The thread that wrote the
    snapshot calls this; nobody retires it meanwhile.
    """
    if not before.asked:
        return
    asked, streams = list(before.asked), own_streams(snapshot.memory.pieces)
    lease = pool.lease(snapshot, _NO_RANK, None)

    def convert() -> None:
        try:
            with streams():
                for at in range(0, len(asked), _AT_ONCE):
                    if snapshot.retired:
                        break
                    snapshot.made(asked[at : at + _AT_ONCE])
        except Exception as error:  # readers that ask for it are told
            logger.debug("version %d of weights is not converted ahead: %s", snapshot.version, error)
        finally:
            pool.release(lease)

    try:
        threads.start(convert, name="raytorchrpc-convert")
    except threads.ThreadShortage:
        pool.release(lease)
