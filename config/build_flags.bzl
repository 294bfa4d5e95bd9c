"""Build flags that are compiled into the library, and the header that carries them."""

_FlagInfo = provider(fields = ["value"])

def _power_of_two_flag_impl(ctx):
    value = ctx.build_setting_value
    allowed = [size for size in [1 << log2 for log2 in range(31)] if size >= ctx.attr.least and size <= ctx.attr.most]
    if value not in allowed:
        fail("--%s=%d: give one of %s" % (ctx.label, value, ", ".join([str(size) for size in allowed])))
    return _FlagInfo(value = value)

power_of_two_flag = rule(
    implementation = _power_of_two_flag_impl,
    build_setting = config.int(flag = True),
    attrs = {
        "least": attr.int(mandatory = True),
        "most": attr.int(mandatory = True),
    },
    doc = "An integer flag that takes the powers of two from `least` to `most`.",
)

def _bool_flag_impl(ctx):
    return _FlagInfo(value = ctx.build_setting_value)

bool_flag = rule(
    implementation = _bool_flag_impl,
    build_setting = config.bool(flag = True),
)

def _header_of_flags_impl(ctx):
    values = {
        "{%s}" % flag.label.name: str(flag[_FlagInfo].value).lower()
        for flag in ctx.attr.flags
    }
    ctx.actions.expand_template(
        template = ctx.file.template,
        output = ctx.outputs.header,
        substitutions = values,
    )

header_of_flags = rule(
    implementation = _header_of_flags_impl,
    attrs = {
        "flags": attr.label_list(mandatory = True, providers = [_FlagInfo]),
        "header": attr.output(mandatory = True),
        "template": attr.label(mandatory = True, allow_single_file = True),
    },
    doc = "`template`, with {flag's name} replaced by the flag's value.",
)
