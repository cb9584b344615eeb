"""Parses XML that may come from anybody: entities are refused, and encodings that expat does not know are read."""

from __future__ import annotations

from xml.etree import ElementTree
from xml.parsers import expat

from utils.files.encoding import EncodingError, decode_xml, encoding_advice

LINE = "line"  # attribute of elements: the line where they begin, which ElementTree's own parser does not provide


class XmlError(ValueError):
    """The message begins with the line number."""


def parse_xml(data: bytes) -> ElementTree.Element:
    """Parses XML. Returns the root element; every element has the attribute `LINE`. Raises XmlError."""
    parser = expat.ParserCreate()
    builder = ElementTree.TreeBuilder()

    def start(tag: str, attributes: dict[str, str]) -> None:
        builder.start(tag, {**attributes, LINE: str(parser.CurrentLineNumber)})

    def refuse(name: str, *_: object) -> None:
        """Entities can include other files or expand to gigabytes."""
        raise XmlError(f"{parser.CurrentLineNumber}: declares the entity '{name}'")

    parser.buffer_text = True
    parser.StartElementHandler = start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data
    parser.EntityDeclHandler = refuse
    try:
        parser.Parse(decode_xml(data), True)
    except XmlError:
        raise
    except EncodingError as error:
        raise XmlError(f"1: malformed XML ({error})") from None
    except expat.ExpatError as error:
        reason = expat.ErrorString(error.code)
        if error.code == expat.errors.codes[expat.errors.XML_ERROR_INVALID_TOKEN]:
            reason = encoding_advice(data) or reason
        raise XmlError(f"{error.lineno}: malformed XML ({reason})") from None
    except (ValueError, LookupError):  # raised by Python's codecs, which the parser uses
        raise XmlError("1: malformed XML (in an encoding that cannot be read)") from None
    return builder.close()
