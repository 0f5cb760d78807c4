"""Tokens and text: the model's chat template, its tokenizer, and what it wrote as pieces of an answer."""
