"""Inference behind one small interface (protocol.py): token ids in, tokens with log-probs and weight versions out."""
