"""Commands that meet in one ledger, as processes that are killed."""
