"""Request tracing across processes: contexts, span records, and their collector.

Each process that handles a request sends the collector one record of its spans, outside the request path.
The collector joins the records, writes one line per request, and exports the traces that are kept.
"""
