"""Optional integrations (`evernear.common.plugins`). The core never imports one, and they do not
import each other."""
