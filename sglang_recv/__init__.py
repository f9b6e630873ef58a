"""Weight updates for SGLang engines: exportable memory passed as file descriptors, one session, no pickle."""

from sglang_recv.client.client import WeightClient, new_session_id
from sglang_recv.client.pool import ExportablePool, exportable_pool
from sglang_recv.client.rounds import Progress
from sglang_recv.client.session import Session, UpdateReport
from sglang_recv.client.target import EngineTarget, HttpTarget, Target
from sglang_recv.errors import RecvError

__all__ = [
    "EngineTarget",
    "ExportablePool",
    "HttpTarget",
    "Progress",
    "RecvError",
    "Session",
    "Target",
    "UpdateReport",
    "WeightClient",
    "exportable_pool",
    "new_session_id",
]
