"""The ledger: the durable record of a run, in one SQLite file. docs/ledger.md describes its tables."""

from headrace.data.ledger.ledger import Ledger
from headrace.data.ledger.pack import digest
from headrace.data.ledger.reader import LedgerReader
from headrace.data.ledger.records import (
    Account,
    BatchRecord,
    CallRecord,
    EpisodeRecord,
    EvaluationRecord,
    GroupRecord,
    GroupState,
    ProcessRecord,
    PublicationRecord,
    ResultRecord,
    TrainedRow,
    UnfinishedGroup,
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
    "PublicationRecord",
    "ResultRecord",
    "TrainedRow",
    "UnfinishedGroup",
    "digest",
]
