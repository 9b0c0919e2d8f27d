"""From files to rows of tokens: formats, templates, masks. Each module is imported by its own name;
nothing heavy is imported here.
"""
