"""The protocol for judging accuracy: declared variants, several data sets and seeds, no choice of epochs."""
