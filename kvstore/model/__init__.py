"""The data model, as plain values and pure functions: keys, spans, kinds of group, layouts, coverage. See README.md."""
