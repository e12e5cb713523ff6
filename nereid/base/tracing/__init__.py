"""Traces of requests across processes: contexts, records of spans, and their collector.

Each process that handles a request sends one record of its spans to the collector, off the request's path.
The collector joins the records, writes a line for each request, and exports the traces that are kept.
"""
