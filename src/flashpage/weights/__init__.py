"""From files to tensors and tokenizers: the only place where checkpoint quirks live."""
