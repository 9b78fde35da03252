"""The ledger: the durable record of a run, in one SQLite file. docs/ledger.md describes its tables."""

from headrace.ledger.ledger import Ledger
from headrace.ledger.pack import digest
from headrace.ledger.reader import LedgerReader
from headrace.ledger.records import (
    Account,
    BatchRecord,
    CallRecord,
    EpisodeRecord,
    EvaluationRecord,
    GroupRecord,
    GroupState,
    ProcessRecord,
    ResultRecord,
    TrainedRow,
    UnfinishedGroup,
    WeightSyncRecord,
)

__all__ = [
    "Account",
    "BatchRecord",
    "CallRecord",
    "EpisodeRecord",
    "EvaluationRecord",
    "GroupRecord",
    "GroupState",
    "Ledger",
    "LedgerReader",
    "ProcessRecord",
    "ResultRecord",
    "TrainedRow",
    "UnfinishedGroup",
    "WeightSyncRecord",
    "digest",
]
