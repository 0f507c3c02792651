import verifiers.v1 as vf

from adding.tool import AddingToolset


class AddingData(vf.TaskData):
    answer: str
    note: str | None


class AddingTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class AddingTask(vf.Task[AddingData, vf.State, AddingTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [AddingToolset(config.tools)]

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

    @vf.metric
    async def undefined(self, trace: vf.Trace) -> float:
        return float("nan")


class AddingConfig(vf.TasksetConfig):
    num_tasks: int = 4
    task: AddingTaskConfig = AddingTaskConfig()


class AddingTaskset(vf.Taskset[AddingTask, AddingConfig]):
    def load(self):
        for n in range(self.config.num_tasks):
            data = AddingData(prompt=f"What is {n}+3?", system_prompt="Use the tool.", answer=str(n + 3), note=None)
            yield AddingTask(data, self.config.task)
