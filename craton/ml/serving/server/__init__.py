"""The HTTP front end of an engine, in a process of its own and without torch:

    python -m craton.ml.serving.server --connection FD --host HOST --port PORT --model-folder FOLDER

It speaks OpenAI's API to clients and `craton.ml.serving.messages` to the engine, over the connection it was given.
"""

from craton.ml.serving.server.app import make_app
from craton.ml.serving.server.link import EngineLink
from craton.ml.serving.server.service import Service
from craton.ml.serving.server.settings import ServerSettings

__all__ = ["EngineLink", "ServerSettings", "Service", "make_app"]
