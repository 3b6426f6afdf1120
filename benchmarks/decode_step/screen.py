"""What a reader of the decode-step benchmark sees, on stderr: progress, a line per row, the table at
the end."""

from typing import Any

from measuring.screen import Screen

_HEADER = [
    "case",
    "ms/step",
    "p20-p80",
    "roofline",
    "target",
    "tok/s",
    "kernels",
    "idle %",
    "host us",
    "capture ms",
    "MiB",
    "error",
    "ready s",
]


class StepScreen(Screen):
    """See `Screen`; rows are those of ``decode_step``."""

    def note(self, text: str) -> None:
        """What is being done now, without counting as a step."""
        if self.bar is not None:
            self.bar.update(self.task, description=text.replace("[", r"\["))

    def row(self, row: dict[str, Any]) -> None:
        """A row is done."""
        if "ms" in row:
            self.say(f"{row['case']}: {row['ms']:.3f} ms, {row['of_roofline']:.0%} of the roofline")
        if "reason" in row:
            self.say(f"{row['case']}: {row['status']}: {row['reason']}")

    def finish(self, document: dict[str, Any]) -> None:
        """The table of the rows that have figures."""
        if not self.enabled:
            return
        lines = [line(row) for row in document["rows"] if "ms" in row]
        self.table("a decode step", _HEADER, lines)
        ceiling = document["ceilings"]
        self.say(
            f"roofline: weights once and keys and values at {ceiling['bytes_per_s'] / 1e12:.3g} TB/s "
            f"({ceiling['bytes_per_s_from']}); "
            "kernels: per step / per layer; idle: between launches / between kernels, as profiled; host: "
            "replay call / the loop's launch; "
            f"MiB: of one bucket, reserved / device; {document['seconds']:.0f} s in all"
        )


def line(row: dict[str, Any]) -> list[str]:
    """The table's cells of a timed row; "-" where something was not measured."""

    def cell(pattern: str, *names: str) -> str:
        values = [row.get(name) for name in names]
        return "-" if any(value is None for value in values) else pattern.format(*values)

    idle = [row.get("idle_between_launches"), row.get("idle_between_kernels")]
    return [
        row["case"] + (" (wrong)" if row["status"] == "wrong" else ""),
        f"{row['ms']:.3f}",
        cell("{:.3f}-{:.3f}", "p20_ms", "p80_ms"),
        f"{row['roofline_ms']:.2f} ({row['of_roofline']:.0%})",
        cell("{:.2f}", "target_ms"),
        f"{row['tokens_per_s']:.0f}",
        cell("{:.0f} / {}", "kernels_per_step", "kernels_per_layer"),
        "-" if None in idle else " / ".join(f"{share:.2%}" for share in idle),
        cell("{:.0f} / {:.0f}", "host_replay_us", "host_launch_us"),
        cell("{:.0f}", "capture_ms"),
        cell("{:.0f} / {:.0f}", "reserved_mib", "device_mib"),
        cell("{:.1e}", "error"),
        cell("{:.1f}", "ready_s"),
    ]
