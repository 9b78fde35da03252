"""A plugin for vLLM: the receiving end of the transports "file" and "gloo".

This folder goes onto the PYTHONPATH of a vLLM server, whose environment need not have Headrace: the plugin imports
torch and vLLM only. `headrace_vllm-1.dist-info` names its entry point.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
