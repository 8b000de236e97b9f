package evernear;

import java.lang.reflect.Field;

/** Private fields of TorchServe's objects and, if the object is a class, its static fields. */
final class Private {
    private Private() {}

    @SuppressWarnings("unchecked")
    static <T> T get(Object object, String name) {
        try {
            return (T) field(object, name).get(object);
        } catch (ReflectiveOperationException fault) {
            throw new IllegalStateException(fault);
        }
    }

    static void set(Object object, String name, Object value) {
        try {
            field(object, name).set(object, value);
        } catch (ReflectiveOperationException fault) {
            throw new IllegalStateException(fault);
        }
    }

    private static Field field(Object object, String name) throws NoSuchFieldException {
        for (Class<?> type = object instanceof Class<?> given ? given : object.getClass();
                type != null;
                type = type.getSuperclass()) {
            for (Field field : type.getDeclaredFields()) {
                if (field.getName().equals(name)) {
                    field.setAccessible(true);
                    return field;
                }
            }
        }
        throw new NoSuchFieldException(name);
    }
}
