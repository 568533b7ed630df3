"""The command line `ledger`, a module a topic. Heavy imports only where a command runs."""
