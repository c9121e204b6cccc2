"""A small trained language model, and the text and the baseline to judge it by."""
