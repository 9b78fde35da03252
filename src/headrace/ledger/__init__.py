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
