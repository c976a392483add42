"""An auto-recovery process as its operators see it."""

from __future__ import annotations

import socket
from functools import partial
from typing import TYPE_CHECKING

from dlcore.backends.direct.metrics import METRICS as CLIENT_METRICS, samples
from dlcore.backends.direct.trial import trial_log, try_log
from dlcore.base.http_options import http_address_of, require_http
from dlcore.base.listening.operator_port import Operated
from dlcore.metadata.operated import METRICS as METADATA_METRICS, session_check, source_of
from dlcore.ops.autorecovery.metrics import METRICS

if TYPE_CHECKING:
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.base.access.tls_in_use import TlsInUse
    from dlcore.ops.autorecovery.config import AutoRecoveryConfig
    from dlcore.ops.autorecovery.metrics import RecoveryFigures


def operated_recovery(
    namespace: DirectNamespace,
    config: AutoRecoveryConfig,
    figures: RecoveryFigures,
    tls: TlsInUse | None,
) -> Operated:
    """Return what the port of an auto-recovery process shows.

    Raises:
        ConfigurationError: its options are wrong, or need a certificate that is not there.
    """
    require_http(config, has_certificate=tls is not None and bool(tls.files.cert))
    context, address = namespace.log_context, http_address_of(config)
    name = trial_log("autorecovery", socket.gethostname(), address.port if address else 0)
    return Operated(
        role="autorecovery",
        metrics=(*METADATA_METRICS, *METRICS, *CLIENT_METRICS),
        sources=[
            source_of(context.store),
            figures.samples,
            partial(samples, context, namespace.get_statistics),
        ],
        checks={"metadata_store": session_check(context.store)},
        trial=partial(try_log, namespace, name),
    )
