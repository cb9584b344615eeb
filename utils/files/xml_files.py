"""Parses untrusted XML: refuses entities, and reads encodings that expat does not support."""

from __future__ import annotations

from xml.etree import ElementTree
from xml.parsers import expat

from utils.files.encoding import EncodingError, decode_xml

LINE = "line"  # attribute of elements: the line where they begin, which ElementTree's own parser does not provide


class XmlError(ValueError):
    """XML that cannot be read. The message begins with the line number."""

    def __init__(self, reason: str, line: int) -> None:
        super().__init__(f"{line}: {reason}")
        self.reason = reason
        self.line = line


def parse_xml(data: bytes) -> ElementTree.Element:
    """Parses XML. Returns the root element; every element has the attribute `LINE`. Raises XmlError."""
    parser = expat.ParserCreate()
    builder = ElementTree.TreeBuilder()

    def start(tag: str, attributes: dict[str, str]) -> None:
        builder.start(tag, {**attributes, LINE: str(parser.CurrentLineNumber)})

    def refuse(name: str, *_: object) -> None:
        """Refuses to declare an entity, which could include other files or expand to gigabytes."""
        raise XmlError(f"declares the entity '{name}'", parser.CurrentLineNumber)

    def refuse_skipped(name: str, is_parameter: bool) -> None:
        """Refuses an entity that only another file may declare: its text would be missing. Parameters have none."""
        if not is_parameter:
            raise XmlError(f"uses the entity '{name}', which it does not declare", parser.CurrentLineNumber)

    parser.buffer_text = True
    parser.StartElementHandler = start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data
    parser.EntityDeclHandler = refuse
    parser.SkippedEntityHandler = refuse_skipped
    try:
        parser.Parse(decode_xml(data), True)
    except XmlError:
        raise
    except EncodingError as error:
        raise XmlError(f"malformed XML ({error})", 1) from None
    except expat.ExpatError as error:
        raise XmlError(f"malformed XML ({expat.ErrorString(error.code)})", error.lineno) from None
    except (ValueError, LookupError):  # raised by Python's codecs, which the parser uses
        raise XmlError("malformed XML (in an encoding that cannot be read)", 1) from None
    return builder.close()
