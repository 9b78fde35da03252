"""The web page over run folders: reads the ledger and the metrics of runs, changes nothing. docs/viewer.md."""
