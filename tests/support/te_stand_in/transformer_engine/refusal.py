def refuse(owner, **options):
    """Raise NotImplementedError if any of the options is set."""
    if named := [name for name, value in options.items() if value]:
        raise NotImplementedError(f"the stand-in's {owner} does not support {', '.join(named)}")
