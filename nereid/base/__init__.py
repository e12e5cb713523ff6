"""What every room uses: contract, errors, files, processes, counters, configs. It imports no other room."""
