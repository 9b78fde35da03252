"""The `headrace` command. Nothing heavy is imported before a command needs it, so that `--help` answers at once."""
