"""Models of the Hugging Face Hub: getting and publishing them.

Nothing of huggingface_hub is imported before it is needed, and nothing that comes is run.
"""
