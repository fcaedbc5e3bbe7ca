"""OpenAI-compatible HTTP front end of an engine, in a separate process without torch.

    python -m craton.ml.serving.server --connection FD --host HOST --port PORT --model-folder FOLDER

It speaks OpenAI's API to clients, and `craton.ml.serving.messages` to the engine over the connection FD.
"""
