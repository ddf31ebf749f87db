from ..errors import UserError as UserError  # moved; this file goes
