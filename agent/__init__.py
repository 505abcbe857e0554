"""One model, many sequences: turns requests into batches and batches into text."""
