import os

import verifiers.v1 as vf


class AddingToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "sums"

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        shown = [name for name in os.environ if name.startswith("MCORE_RL") and "KEY" in name]
        assert not shown, f"keys are hidden from tools, found {shown}"
        return str(a + b)


if __name__ == "__main__":
    AddingToolset.run()
