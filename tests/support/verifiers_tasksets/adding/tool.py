import verifiers.v1 as vf


class AddingToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "sums"

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


if __name__ == "__main__":
    AddingToolset.run()
