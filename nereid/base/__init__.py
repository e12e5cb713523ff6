"""Shared foundations: contract, errors, files, processes, counters, configs. Imports no other subpackage."""
