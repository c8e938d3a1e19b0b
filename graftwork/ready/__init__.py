"""Ready steps: what a model ran with, kept on this machine, from which it starts without torch.

The first run of a model traces it, runs the recipe's passes, lowers the program and lays out its
weights. `keep` then puts the ONNX files, weights, plan and tokenizer into the user's cache folder;
the next run of the same command opens them with ONNX Runtime and numpy alone (`start`). Only what
the plan runner can do is kept: greedy decoding of one text on the CPU.
"""
