"""The protocol for comparing accuracy: declared variants, several data sets and seeds, no selection of epochs."""
